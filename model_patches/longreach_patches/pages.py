"""The tensors behind the KV cache: fixed-size pages of keys and values, one pair of tensors a layer.

Pages hold numbers of the model's dtype, or 8-bit floats (e4m3) with a scale for each layer and head, `KVScales`. In
some layers the bounds of their keys lie beside them, for decodes that read a budget of keys; what is done to a page is
done to its bounds.

A page holds `page_size` consecutive tokens of one sequence. Who owns which page is not known here: the engine deals in
page ids, and a *slot* (`page * page_size + offset`) says where one token's key and value live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from longreach_kernels import PagedBatch
from longreach_kernels.sizes import KEY_BLOCK
from longreach_kernels.sparse import write_bounds
from transformers import PretrainedConfig

from longreach_patches.cache.states import StateStep
from longreach_patches.families import attention_layers, head_shape, head_shapes, layer_sources
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.policy_step import StepGroup, StepMeasurements, StepRecord


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


FP8 = torch.float8_e4m3fn
_KV_DTYPES = {"auto": None, "fp8": FP8}
# The largest number that was seen is stored as a half of what fp8 holds: twice as much still fits.
_HEADROOM = 2.0


def resolve_kv_dtype(
    name: str, dtype: torch.dtype, device: torch.device | None = None, brings_scales: bool = False
) -> torch.dtype:
    """Turn "auto" or "fp8" into the dtype of pages: "auto" is the model's own `dtype`, or fp8 where a checkpoint brings
    scales and the device computes with it.

    Raises:
        ValueError: there is no such type, or `device` is a GPU that does not compute with it.
    """
    if name not in _KV_DTYPES:
        raise ValueError(f"kv_cache_dtype must be {' or '.join(_KV_DTYPES)}, got {name!r}")
    old = device is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    if name == "fp8" and old:
        raise ValueError("fp8 KV pages need a GPU of compute capability 8.9 or later; use --kv-cache-dtype auto")
    if name == "auto" and brings_scales and not old:
        return FP8
    return _KV_DTYPES[name] or dtype


@dataclass(frozen=True)
class KVScales:
    """What the 8-bit numbers of a layer's heads are multiplied by: `keys` and `values`, (Hkv,) fp32 of each layer."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, pages: KVPages) -> KVScales:
        """Scales for numbers of the size of those that `pages`, in another dtype, hold."""
        limit = torch.finfo(FP8).max / _HEADROOM
        keys, values = (
            tuple(layer.abs().amax((0, 1, 3)).float().clamp(min=1e-6) / limit for layer in layers)
            for layers in (pages.keys, pages.values)
        )
        return cls(keys, values)

    @classmethod
    def of_checkpoint(
        cls,
        config: PretrainedConfig,
        found: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        layout: RankLayout,
        device: torch.device,
    ) -> KVScales | None:
        """Scales that a checkpoint brings by layer, of all heads together or of each, for this rank's heads; None where
        a layer that keeps keys has none. `found` has them by the numbers of decoder layers.

        Raises:
            ValueError: a layer has another number of scales than of heads.
        """
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        layers = attention_layers(config)
        for index, shape, source in zip(layers, head_shapes(config), layer_sources(config), strict=True):
            if (of_source := found.get(layers[source])) is None:
                return None
            own = layout.part(shape.kv_heads)
            for side, scale in zip(sides, of_source, strict=True):
                if len(scale) not in (1, shape.kv_heads):
                    raise ValueError(
                        f"layer {index} has {len(scale)} scales of keys or values for {shape.kv_heads} KV heads"
                    )
                each = scale.expand(shape.kv_heads)[own.start : own.stop]
                side.append(each.contiguous().to(device))
        return cls(tuple(sides[0]), tuple(sides[1]))


class KVPages:
    """`num_pages` pages, allocated once: per layer a key and a value tensor (num_pages, page_size, Hkv, D), and in the
    bounded layers the keys' bounds (num_pages, page_size // 16, Hkv, 2, D); None in the others.

    A layer that reads another's keys and values has that layer's tensors here, and must not write them."""

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device, scales: KVScales | None = None) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        if (scales is None) != (shape.dtype != FP8):
            raise ValueError(f"scales belong to pages of {FP8} and to no others, got {scales} for {shape.dtype}")
        self.shape = shape
        self.num_pages = num_pages
        # Of each layer's keys and values, or None.
        self.scales: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * shape.num_layers
        if scales is not None:
            self.scales = list(zip(scales.keys, scales.values, strict=True))
        # Layers that are alike share a tensor: (layers, 2, num_pages, page_size, Hkv, D). Few models have several.
        self._storage: list[torch.Tensor] = []
        kept: dict[int, torch.Tensor] = {}
        for layers, heads, head_dim in _alike(shape, shape.keeping):
            size = (len(layers), 2, num_pages, shape.page_size, heads, head_dim)
            self._storage.append(_room(size, shape.dtype, device))
            kept |= zip(layers, self._storage[-1].unbind(0), strict=True)
        sources = [layer.source for layer in shape.layers]
        self.keys: tuple[torch.Tensor, ...] = tuple(kept[source][0] for source in sources)
        self.values: tuple[torch.Tensor, ...] = tuple(kept[source][1] for source in sources)
        self._bounds: list[torch.Tensor] = []
        bounds: dict[int, torch.Tensor] = {}
        for layers, heads, head_dim in _alike(shape, shape.keeping_bounds):
            size = (len(layers), num_pages, shape.page_size // KEY_BLOCK, heads, 2, head_dim)
            self._bounds.append(_room(size, shape.dtype, device))
            bounds |= zip(layers, self._bounds[-1].unbind(0), strict=True)
        self.bounds: tuple[torch.Tensor | None, ...] = tuple(bounds.get(source) for source in sources)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into all pages together."""
        return self.num_pages * self.shape.page_size

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._storage[0].device

    @property
    def words_per_page(self) -> int:
        """Words of 8 bytes that one page takes in all layers together; page sizes are multiples of 16 tokens."""
        return self.shape.bytes_per_page // 8

    def keeps(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own, and writes them; else it reads an earlier layer's."""
        return self.shape.layers[layer].source == layer

    def bound_keys(self, layer: int, slots: torch.Tensor, backend: str) -> None:
        """Bring a layer's bounds up to date once its keys have been written to `slots`, if it keeps any."""
        bounds = self.bounds[layer]
        if bounds is not None:
            write_bounds(self.keys[layer], bounds, slots, backend=backend)

    def clear(self, pages: list[int]) -> None:
        """Fill these pages with zeros, in all layers."""
        ids = self._ids(pages)
        for dim, tensors in ((2, self._storage), (1, self._bounds)):
            for tensor in tensors:
                tensor.view(torch.uint8).index_fill_(dim, ids, 0)  # as bytes: not every dtype can be filled

    def read(self, pages: list[int]) -> torch.Tensor:
        """The contents of these pages, in all layers, as a new tensor (len(pages), words_per_page) int64."""
        ids = self._ids(pages)
        parts = [part.index_select(0, ids).flatten(1) for part in self._by_page()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def write(self, pages: list[int], contents: torch.Tensor) -> None:
        """Give pages the `contents` (len(pages), words_per_page) int64 that `read` gave of others of this shape."""
        ids = self._ids(pages)
        by_page = self._by_page()
        widths = [part[0].numel() for part in by_page]
        for part, own in zip(by_page, contents.split(widths, 1), strict=True):
            part.index_copy_(0, ids, own.unflatten(1, part.shape[1:]))

    def _ids(self, pages: list[int]) -> torch.Tensor:
        ids = torch.tensor(pages)
        return ids.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else ids

    def _by_page(self) -> list[torch.Tensor]:
        """All contents: of keys and values (num_pages, 2 * layers, words) for each kind of layer, of bounds, if there
        are any, (num_pages, layers, words), int64: as words, since not every dtype can be indexed."""
        parts = [*(storage.flatten(0, 1) for storage in self._storage), *self._bounds]
        return [part.view(torch.uint8).flatten(2).view(torch.int64).transpose(0, 1) for part in parts]


def _alike(shape: PageShape, indices: tuple[int, ...]) -> list[tuple[list[int], int, int]]:
    """Those of the layers that are alike, in order, with their KV heads and channels."""
    found: dict[tuple[int, int], list[int]] = {}
    for index in indices:
        layer = shape.layers[index]
        found.setdefault((layer.num_kv_heads, layer.head_dim), []).append(index)
    return [(layers, *sizes) for sizes, layers in found.items()]


def _room(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # On a GPU a tile may read past a sequence's end, into memory never written, and 0 * NaN is NaN. On a CPU
    # nothing does, and memory that is not touched is not used.
    make = torch.empty if device.type == "cpu" else torch.zeros
    # Not every function that fills tensors knows 8-bit floats, whose 0 is the byte 0.
    return make(size, dtype=torch.uint8 if dtype == FP8 else dtype, device=device).view(dtype)


class WantedRows(NamedTuple):
    """The rows of a step whose results are wanted: `rows` (R,) int64, ascending, the last ones of each of some of its
    sequences, and those sequences with these queries alone, as `batch`; None if there are none."""

    rows: torch.Tensor
    batch: PagedBatch | None


@dataclass(frozen=True)
class PagedStep:
    """One forward pass over the pages, handed to a patched model as the keyword argument `paged_step`.

    The model's input is one row of T tokens, the new tokens of all sequences one after another. `slots` (T,) int64
    says where each token's key and value go (-1: nowhere, padding); `batch` says which tokens belong together and where
    their earlier keys lie. `mask_placeholder` must be passed as the model's `attention_mask`.

    Where sequences differ in how they compute attention, `groups` has all of them, in order, and stands for `batch`.
    The layers note in `record` what they measure of the groups; `measured` has it when the step is computed.

    The last layer computes keys and values of all tokens, and all else for `wanted` only, if that is given: the model
    then gives R rows for T. A model whose layers are not fused refuses it, and a step with groups has none.

    `states` are those of layers that keep one in place of keys and values; None for models without such layers.
    """

    pages: KVPages
    batch: PagedBatch
    slots: torch.Tensor
    groups: tuple[StepGroup, ...] = ()
    wanted: WantedRows | None = None
    states: StateStep | None = None
    record: StepRecord = field(default_factory=StepRecord)

    def measured(self) -> StepMeasurements:
        """What the layers have measured of each group, once the step is computed."""
        return tuple(self.record.of_group(index).measured() for index in range(len(self.groups)))

    def of_wanted(self) -> PagedStep:
        """The step of the wanted rows alone, of which there must be some."""
        assert self.wanted is not None
        assert self.wanted.batch is not None
        assert not self.groups, "a step with groups computes all rows"
        return replace(self, batch=self.wanted.batch, slots=self.slots[self.wanted.rows], wanted=None)

    @property
    def mask_placeholder(self) -> torch.Tensor:
        """A 4-D tensor of one element: transformers takes a 4-D mask as ready made and builds none of its own.

        Without it, transformers inspects the position ids for packed sequences, which waits for the GPU. It carries the
        step (`step_behind`): the layers of some families hand on their mask, and not what else they are given.
        """
        mask = self.slots.new_zeros(()).view(1, 1, 1, 1)
        setattr(mask, _STEP, self)
        return mask


_STEP = "longreach_step"


def step_behind(mask: object) -> PagedStep | None:
    """The step whose `mask_placeholder` this is; None for other masks."""
    return getattr(mask, _STEP, None)
