"""The size of a page of tokens, told from a model's config: which layers keep keys and values, and of what size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from longreach_kernels.sizes import KEY_BLOCK
from transformers import PretrainedConfig

from longreach_patches.cache.groups import LayerGroup
from longreach_patches.families import head_shape, head_shapes, layer_sources
from longreach_patches.layout import SINGLE, RankLayout


class LayerPages(NamedTuple):
    """One layer's keys and values: KV heads, the channels of each, and the layer that keeps them, itself or an earlier
    one."""

    num_kv_heads: int
    head_dim: int
    source: int


@dataclass(frozen=True)
class PageShape:
    """The size of one token's keys and values across all layers, and of a page of tokens.

    Attributes:
        num_layers: decoder layers that attend; layers are numbered among these.
        num_kv_heads, head_dim: of every layer, or where they differ of the layers that see everything.
        dtype: of the numbers.
        page_size: tokens in a page.
        bounded: the layers whose keys have bounds, in order.
        different: each layer's keys and values, where layers are not alike or share them; else empty.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    bounded: tuple[int, ...] = ()
    different: tuple[LayerPages, ...] = ()

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        dtype: torch.dtype,
        page_size: int,
        layout: RankLayout = SINGLE,
        bounded: tuple[int, ...] = (),
    ) -> PageShape:
        """Read the shape from a model's config; `page_size` is in tokens. Each rank has pages for its own KV heads."""
        shape = head_shape(config)
        kv_heads = len(layout.part(shape.kv_heads))
        layers = tuple(
            LayerPages(len(layout.part(of_layer.kv_heads)), of_layer.head_dim, source)
            for of_layer, source in zip(head_shapes(config), layer_sources(config), strict=True)
        )
        alike = cls(len(layers), kv_heads, shape.head_dim, dtype, page_size, bounded)
        return alike if layers == alike.layers else replace(alike, different=layers)

    @cached_property
    def layers(self) -> tuple[LayerPages, ...]:
        """Each layer's keys and values, first to last."""
        return self.different or tuple(
            LayerPages(self.num_kv_heads, self.head_dim, index) for index in range(self.num_layers)
        )

    @cached_property
    def keeping(self) -> tuple[int, ...]:
        """The layers that keep keys and values, in order; the others read those of one of these."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.source == index)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers that keep keys and values, by what they keep; those of one group share page ids."""
        return (LayerGroup("full", self.keeping),)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Of each layer, which of the `groups` has the keys and values that it reads."""
        found = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(found[layer.source] for layer in self.layers)

    @cached_property
    def keeping_bounds(self) -> tuple[int, ...]:
        """The layers that keep the bounds of the `bounded` ones, in order."""
        return tuple(sorted({self.layers[index].source for index in self.bounded}))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one cached token takes: a key and a value in every layer, and its part of the bounds."""
        return -(-self.bytes_per_page // self.page_size)

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers together."""
        rows = [(index, self.page_size) for index in self.keeping]
        rows += [(index, self.page_size // KEY_BLOCK) for index in self.keeping_bounds]
        layers = self.layers
        numbers = sum(count * layers[index].num_kv_heads * layers[index].head_dim for index, count in rows)
        return 2 * numbers * self.dtype.itemsize
