"""Attention of one long sequence whose tokens are spread over several devices (context or sequence parallelism)."""

from .api import context_parallel_attention
from .heads import heads_to_tokens, packed_to_heads, tokens_to_heads
from .segments import Segment, contiguous_sizes, zigzag_join, zigzag_segments, zigzag_split

__all__ = [
    "Segment",
    "context_parallel_attention",
    "contiguous_sizes",
    "heads_to_tokens",
    "packed_to_heads",
    "tokens_to_heads",
    "zigzag_join",
    "zigzag_segments",
    "zigzag_split",
]
