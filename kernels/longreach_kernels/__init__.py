"""Exact attention for long sequences: masks as values, and kernels that skip what a mask hides.

Depends on torch, and for a GPU on triton, only. Start with `attention`, `ragged_attention` or `paged_attention`.
"""

from .api import attention, decode_needs, list_tiles, paged_attention, ragged_attention, write_pages
from .backends import Backend, resolve_backend
from .batch import PagedBatch
from .masks import BlockSparse, Causal, Full, Mask, Window
from .needs import DecodeNeeds
from .rotation import rotate
from .tile_lists import TileLists

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
