"""The tensors behind the KV cache: fixed-size pages of keys and values, one pair of tensors a layer.

A page holds `page_size` consecutive tokens of one sequence. Who owns which page is not known here: the engine deals in
page ids, and a *slot* (`page * page_size + offset`) says where one token's key and value live.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from longreach_kernels import PagedBatch
from transformers import PretrainedConfig

from .families import layer_masks


@dataclass(frozen=True)
class PageShape:
    """The size of one token's keys and values across all layers, and of a page of tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype, page_size: int) -> PageShape:
        """Read the shape from a model's config; `page_size` is in tokens."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(len(layer_masks(config)), config.num_key_value_heads, head_dim, dtype, page_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one cached token takes: a key and a value in every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers together."""
        return self.bytes_per_token * self.page_size


class KVPages:
    """`num_pages` pages, allocated once: per layer a key and a value tensor (num_pages, page_size, Hkv, D)."""

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.shape = shape
        self.num_pages = num_pages
        size = (shape.num_layers, 2, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        # On a GPU a tile may read past a sequence's end, into memory never written, and 0 * NaN is NaN. On a CPU
        # nothing does, and memory that is not touched is not used.
        make = torch.empty if device.type == "cpu" else torch.zeros
        storage = make(size, dtype=shape.dtype, device=device)
        self._storage = storage
        self.keys: tuple[torch.Tensor, ...] = tuple(storage[:, 0].unbind(0))
        self.values: tuple[torch.Tensor, ...] = tuple(storage[:, 1].unbind(0))

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into all pages together."""
        return self.num_pages * self.shape.page_size

    def clear(self, pages: list[int]) -> None:
        """Fill these pages with zeros, in all layers."""
        ids = torch.tensor(pages)
        if self._storage.is_cuda:
            ids = ids.pin_memory().to(self._storage.device, non_blocking=True)
        self._storage.view(torch.uint8).index_fill_(2, ids, 0)  # as bytes: not every dtype can be filled


@dataclass(frozen=True)
class PagedStep:
    """One forward pass over the pages, handed to a patched model as the keyword argument `paged_step`.

    The model's input is one row of T tokens, the new tokens of all sequences one after another. `slots` (T,) int64
    says where each token's key and value go (-1: nowhere, padding); `batch` says which tokens belong together and where
    their earlier keys lie. `mask_placeholder` must be passed as the model's `attention_mask`.
    """

    pages: KVPages
    batch: PagedBatch
    slots: torch.Tensor

    @property
    def mask_placeholder(self) -> torch.Tensor:
        """A 4-D tensor of one element: transformers takes a 4-D mask as ready made and builds none of its own.

        Without it, transformers inspects the position ids for packed sequences, which waits for the GPU.
        """
        return self.slots.new_zeros(()).view(1, 1, 1, 1)
