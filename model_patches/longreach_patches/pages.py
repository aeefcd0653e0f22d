"""The tensors behind the KV cache: fixed-size pages of keys and values, one pair of tensors a layer.

Pages hold numbers of the model's dtype, or 8-bit floats (e4m3) with a scale for each layer and head, `KVScales`.

A page holds `page_size` consecutive tokens of one sequence. Who owns which page is not known here: the engine deals in
page ids, and a *slot* (`page * page_size + offset`) says where one token's key and value live.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from longreach_kernels import PagedBatch
from transformers import PretrainedConfig

from .families import layer_masks
from .layout import SINGLE, RankLayout
from .policy_step import StepGroup


@dataclass(frozen=True)
class PageShape:
    """The size of one token's keys and values across all layers, and of a page of tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype, page_size: int, layout: RankLayout = SINGLE) -> PageShape:
        """Read the shape from a model's config; `page_size` is in tokens. Each rank has pages for its own KV heads."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = len(layout.part(config.num_key_value_heads))
        return cls(len(layer_masks(config)), kv_heads, head_dim, dtype, page_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one cached token takes: a key and a value in every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers together."""
        return self.bytes_per_token * self.page_size


FP8 = torch.float8_e4m3fn
_KV_DTYPES = {"auto": None, "fp8": FP8}
# The largest number that was seen is stored as a half of what fp8 holds: twice as much still fits.
_HEADROOM = 2.0


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device | None = None) -> torch.dtype:
    """Turn "auto" (the model's own `dtype`) or "fp8" into the dtype of pages.

    Raises:
        ValueError: there is no such type, or `device` is a GPU that does not compute with it.
    """
    if name not in _KV_DTYPES:
        raise ValueError(f"kv_cache_dtype must be {' or '.join(_KV_DTYPES)}, got {name!r}")
    old = device is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    if name == "fp8" and old:
        raise ValueError("fp8 KV pages need a GPU of compute capability 8.9 or later; use --kv-cache-dtype auto")
    return _KV_DTYPES[name] or dtype


@dataclass(frozen=True)
class KVScales:
    """What the 8-bit numbers of each layer's heads are multiplied by: `keys` and `values` (layers, Hkv) fp32."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, pages: KVPages) -> KVScales:
        """Scales for numbers of the size of those that `pages`, in another dtype, hold."""
        limit = torch.finfo(FP8).max / _HEADROOM
        keys, values = (
            torch.stack([layer.abs().amax((0, 1, 3)).float().clamp(min=1e-6) / limit for layer in layers])
            for layers in (pages.keys, pages.values)
        )
        return cls(keys, values)


class KVPages:
    """`num_pages` pages, allocated once: per layer a key and a value tensor (num_pages, page_size, Hkv, D)."""

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
        size = (shape.num_layers, 2, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        # On a GPU a tile may read past a sequence's end, into memory never written, and 0 * NaN is NaN. On a CPU
        # nothing does, and memory that is not touched is not used.
        make = torch.empty if device.type == "cpu" else torch.zeros
        # Not every function that fills tensors knows 8-bit floats, whose 0 is the byte 0.
        storage = make(size, dtype=torch.uint8 if shape.dtype == FP8 else shape.dtype, device=device).view(shape.dtype)
        self._storage = storage
        self.keys: tuple[torch.Tensor, ...] = tuple(storage[:, 0].unbind(0))
        self.values: tuple[torch.Tensor, ...] = tuple(storage[:, 1].unbind(0))

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into all pages together."""
        return self.num_pages * self.shape.page_size

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._storage.device

    @property
    def words_per_page(self) -> int:
        """Words of 8 bytes that one page takes in all layers together; page sizes are multiples of 16 tokens."""
        return self.shape.bytes_per_page // 8

    def clear(self, pages: list[int]) -> None:
        """Fill these pages with zeros, in all layers."""
        self._storage.view(torch.uint8).index_fill_(2, self._ids(pages), 0)  # as bytes: not every dtype can be filled

    def read(self, pages: list[int]) -> torch.Tensor:
        """The contents of these pages, in all layers, as a new tensor (len(pages), words_per_page) int64."""
        return self._by_page().index_select(0, self._ids(pages)).flatten(1)

    def write(self, pages: list[int], contents: torch.Tensor) -> None:
        """Give pages the `contents` (len(pages), words_per_page) int64 that `read` gave of others of this shape."""
        by_page = self._by_page()
        by_page.index_copy_(0, self._ids(pages), contents.view(len(pages), *by_page.shape[1:]))

    def _ids(self, pages: list[int]) -> torch.Tensor:
        ids = torch.tensor(pages)
        return ids.pin_memory().to(self.device, non_blocking=True) if self._storage.is_cuda else ids

    def _by_page(self) -> torch.Tensor:
        """All contents (num_pages, 2 * layers, words) int64: as words, since not every dtype can be indexed."""
        words = self._storage.view(torch.uint8).flatten(0, 1).flatten(2).view(torch.int64)
        return words.transpose(0, 1)


@dataclass(frozen=True)
class PagedStep:
    """One forward pass over the pages, handed to a patched model as the keyword argument `paged_step`.

    The model's input is one row of T tokens, the new tokens of all sequences one after another. `slots` (T,) int64
    says where each token's key and value go (-1: nowhere, padding); `batch` says which tokens belong together and where
    their earlier keys lie. `mask_placeholder` must be passed as the model's `attention_mask`.

    Where sequences differ in how they compute attention, `groups` has all of them, in order, and stands for `batch`.
    """

    pages: KVPages
    batch: PagedBatch
    slots: torch.Tensor
    groups: tuple[StepGroup, ...] = ()

    @property
    def mask_placeholder(self) -> torch.Tensor:
        """A 4-D tensor of one element: transformers takes a 4-D mask as ready made and builds none of its own.

        Without it, transformers inspects the position ids for packed sequences, which waits for the GPU.
        """
        return self.slots.new_zeros(()).view(1, 1, 1, 1)
