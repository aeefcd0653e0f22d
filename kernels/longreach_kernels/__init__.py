"""Exact attention for long sequences: masks as values, and kernels that skip what a mask hides.

Depends on torch, and for a GPU on triton, only. Start with `attention`, `ragged_attention` or `paged_attention`.
"""

from longreach_kernels.api import attention, ragged_attention
from longreach_kernels.backends.resolve import Backend, resolve_backend
from longreach_kernels.batch import DecodeNeeds, PagedBatch
from longreach_kernels.masks.block_sparse import BlockSparse
from longreach_kernels.masks.mask import Causal, Full, Mask, Window
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.paged_api import decode_needs, list_tiles, paged_attention, write_pages
from longreach_kernels.rotation import rotate

__all__ = [
    "Backend",
    "BlockSparse",
    "Causal",
    "DecodeNeeds",
    "Full",
    "Mask",
    "PagedBatch",
    "TileLists",
    "Window",
    "attention",
    "decode_needs",
    "list_tiles",
    "paged_attention",
    "ragged_attention",
    "resolve_backend",
    "rotate",
    "write_pages",
]
