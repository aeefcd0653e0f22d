"""The size of a page of tokens, told from a model's config: which layers keep keys and values, and of what size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from longreach_kernels.sizes import KEY_BLOCK
from transformers import PretrainedConfig

from longreach_patches.cache.groups import LayerGroup, divide
from longreach_patches.families import head_shape, head_shapes, layer_masks, layer_sources
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
        divided: the groups of layers that have pages of their own; empty where all layers share pages.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    bounded: tuple[int, ...] = ()
    different: tuple[LayerPages, ...] = ()
    divided: tuple[LayerGroup, ...] = ()

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        dtype: torch.dtype,
        page_size: int,
        layout: RankLayout = SINGLE,
        bounded: tuple[int, ...] = (),
        *,
        divided: bool = False,
    ) -> PageShape:
        """Read the shape from a model's config; `page_size` is in tokens. Each rank has pages for its own KV heads.

        With `divided` layers with windows have pages apart from the others, if the size of the largest layer is a
        multiple of all others' that keep keys; else a page is one of all layers.
        """
        shape = head_shape(config)
        kv_heads = len(layout.part(shape.kv_heads))
        layers = tuple(
            LayerPages(len(layout.part(of_layer.kv_heads)), of_layer.head_dim, source)
            for of_layer, source in zip(head_shapes(config), layer_sources(config), strict=True)
        )
        alike = cls(len(layers), kv_heads, shape.head_dim, dtype, page_size, bounded)
        shape = alike if layers == alike.layers else replace(alike, different=layers)
        sizes = {index: layers[index].num_kv_heads * layers[index].head_dim for index in shape.keeping}
        largest = max(sizes.values())
        if not divided or any(largest % size for size in sizes.values()):
            return shape
        windows = [None if mask.band.sinks else mask.band.window for mask in layer_masks(config)]
        if any(windows[index] != windows[layer.source] for index, layer in enumerate(layers)):
            return shape  # a layer sees more of another's keys than that one does
        kept = {index: windows[index] for index in shape.keeping}
        if not any(kept.values()):
            return shape
        return replace(shape, divided=divide(kept, {index: largest // size for index, size in sizes.items()}))

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
        return self.divided or (LayerGroup("full", self.keeping),)

    @cached_property
    def place_of(self) -> tuple[int, ...]:
        """Of each layer the place of the keys and values that it reads within a page, among those of its group."""
        found = {layer: place for group in self.groups for place, layer in enumerate(group.layers)}
        return tuple(found[layer.source] for layer in self.layers)

    @cached_property
    def largest(self) -> int:
        """The first of the layers that keep the most bytes of a token."""
        return max(self.keeping, key=lambda index: self.layers[index].num_kv_heads * self.layers[index].head_dim)

    @cached_property
    def stride_of(self) -> tuple[int, ...]:
        """Of each layer the stride of its group."""
        return tuple(self.groups[group].stride for group in self.group_of)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Of each group the tokens that its layers see, or None for all."""
        return tuple(group.window for group in self.groups)

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
        """Bytes that one cached token takes: a key and a value in every layer, and its part of the bounds. Of a layer
        with a window only as long as the window sees it, where layers are divided."""
        return -(-len(self.groups) * self.bytes_per_page // self.page_size)

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page id takes: keys and values of all layers together, or of as many as the largest group
        has."""
        layers, kept, bounded = self.layers, list(self.keeping), list(self.keeping_bounds)
        if self.divided:
            places = max(-(-len(group.layers) // group.stride) for group in self.groups)
            kept = [self.largest] * places
            bounded = [self.largest] * len({self.place_of[index] // self.stride_of[index] for index in bounded})
        rows = [(index, self.page_size) for index in kept]
        rows += [(index, self.page_size // KEY_BLOCK) for index in bounded]
        numbers = sum(count * layers[index].num_kv_heads * layers[index].head_dim for index, count in rows)
        return 2 * numbers * self.dtype.itemsize
