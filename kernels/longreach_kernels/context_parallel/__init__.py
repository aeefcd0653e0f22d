"""Attention of one long sequence whose tokens are spread over several devices (context or sequence parallelism)."""

from longreach_kernels.context_parallel.api import context_parallel_attention
from longreach_kernels.context_parallel.heads import heads_to_tokens, packed_to_heads, tokens_to_heads
from longreach_kernels.context_parallel.segments import (
    Segment,
    contiguous_sizes,
    zigzag_join,
    zigzag_segments,
    zigzag_split,
)

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
