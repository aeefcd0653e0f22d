# pyright: reportGeneralTypeIssues=false
"""Before the Hopper prefill over 8-bit pages: values with their keys side by side, in plain Triton.

The tensor cores of sm_90 take 8-bit operands only with the dimension that they sum over contiguous, which for P V is
that of the keys, where pages have the channels. So each key tile of V is transposed once a call: work in proportion to
the keys, beside attention's, which is in proportion to queries times keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import launch


@triton.jit(do_not_specialize=["stride_table", "tiles_of_seq"], do_not_specialize_on_alignment=["ContextLens", "Table"])
def transpose_kernel(
    V,
    Out,
    ContextLens,
    Table,
    stride_token,
    stride_head,
    stride_table,
    tiles_of_seq,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Grid (tiles_of_seq, B, Hkv), of bytes. A tile beyond a sequence's end is left alone, but for its first."""
    tile = tl.program_id(0)
    seq = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    num_keys = tl.load(ContextLens + seq)
    if (tile * BN >= num_keys) & (tile > 0):
        return
    place = tl.arange(0, BN)
    inside = place % 16
    keys = tile * BN + place // 16 * 16 + inside % 4 // 2 * 8 + inside // 4 * 2 + inside % 2  # as `softmax.pack8` has P
    page = tl.load(Table + seq.to(tl.int64) * stride_table + keys // PAGE_SIZE, mask=keys < num_keys, other=0)
    rows = page.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
    channels = tl.arange(0, D)
    mask = (keys < num_keys)[:, None] & (channels < HEAD_DIM)[None, :]
    values = tl.load(V + rows[:, None] * stride_token + head * stride_head + channels[None, :], mask=mask, other=0)
    slot = (head * tl.num_programs(1) + seq) * tiles_of_seq + tile
    tl.store(Out + slot * (D * BN) + channels[:, None] * BN + place[None, :], tl.trans(values))


def transposed(
    v: Tensor, context_lens: Tensor, page_table: Tensor, page_size: int, *, tiles_of_seq: int, width: int, block: int
) -> Tensor:
    """Values of a paged batch, tile after tile: (Hkv, B * tiles_of_seq * width, block), 8-bit floats.

    Keys beyond a sequence's end are zeros, and so are channels from D on. Of tiles that lie wholly behind the end only
    a sequence's first is written.

    Args:
        v: (num_pages * page_size, Hkv, D), 8-bit floats, channels contiguous.
        context_lens: (B,) int32; page_table: (B, max_pages) int32.
        tiles_of_seq: tiles that the longest sequence may have, at least one.
        width: rows of a tile: D, or the power of two from there on.
        block: keys in a tile, a divisor of `page_size` and a multiple of 16.
    """
    num_seqs, heads = context_lens.shape[0], v.shape[1]
    constants: dict[str, Any] = {"HEAD_DIM": v.shape[2], "D": width, "BN": block, "PAGE_SIZE": page_size}
    out = torch.empty((heads, num_seqs * tiles_of_seq * width, block), dtype=v.dtype, device=v.device)
    launch(
        transpose_kernel,
        (tiles_of_seq, num_seqs, heads),
        v.view(torch.uint8),
        out.view(torch.uint8),
        context_lens,
        page_table,
        v.stride(0),
        v.stride(1),
        page_table.stride(0),
        tiles_of_seq,
        **constants,
    )
    return out
