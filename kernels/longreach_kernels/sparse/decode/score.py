"""The greatest logit that any key of a block may have, from its bounds, in Triton."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.arguments import padded
from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.batch import PagedBatch
from longreach_kernels.sizes import KEY_BLOCK


@triton.jit(
    do_not_specialize=["stride_table", "limit", "scale", "softcap"],
    do_not_specialize_on_alignment=["CuQ", "ContextLens", "Table", "KScale"],
)
def score_kernel(
    Q,
    Bounds,
    Logits,
    Best,
    KScale,
    CuQ,
    ContextLens,
    Table,
    stride_qt,
    stride_qh,
    stride_table,
    limit,
    scale,
    softcap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS_OF_PAGE: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Grid (parts of the blocks, Hkv, B)."""
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    num_keys = tl.load(ContextLens + seq)
    block = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    inside = block * BLOCK_SIZE < num_keys
    table = Table + seq.to(tl.int64) * stride_table
    page = tl.load(table + block // BLOCKS_OF_PAGE, mask=inside, other=0).to(tl.int64)
    row = ((page * BLOCKS_OF_PAGE + block % BLOCKS_OF_PAGE) * KV_HEADS + kv_head) * (2 * HEAD_DIM)
    loaded = inside[:, None] & (offs_d[None, :] < HEAD_DIM)
    least = tl.load(Bounds + row[:, None] + offs_d[None, :], mask=loaded, other=0.0).to(tl.float32)
    greatest = tl.load(Bounds + row[:, None] + HEAD_DIM + offs_d[None, :], mask=loaded, other=0.0).to(tl.float32)
    q_row = Q + tl.load(CuQ + seq).to(tl.int64) * stride_qt
    factor = scale * tl.load(KScale + kv_head) if SCALED else scale
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        q = tl.load(q_row + head * stride_qh + offs_d, mask=offs_d < HEAD_DIM, other=0.0).to(tl.float32)
        logit = tl.sum(tl.maximum(q[None, :] * least, q[None, :] * greatest), 1) * factor
        if SOFTCAP:
            logit = softcap * (1 - 2 / (tl.exp(2 * logit / softcap) + 1))  # tanh
        # None is infinite or no number, so that sums of weights stay numbers.
        logit = tl.where(inside, tl.minimum(logit, 3e38), float("-inf"))
        at = Logits + (seq.to(tl.int64) * (KV_HEADS * GROUP) + head) * limit + block
        tl.store(at, logit, mask=block < limit)
        best = tl.maximum(best, logit)
    tl.store(Best + (seq.to(tl.int64) * KV_HEADS + kv_head) * limit + block, best, mask=block < limit)


def scores(
    q: Tensor, bounds: Tensor, batch: PagedBatch, scale: float, softcap: float | None, k_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The greatest logit of each block in one launch, (B, Hq, blocks) fp32, and of each KV head's query heads the
    greatest, (B, Hkv, blocks); -inf beyond a sequence's end.

    Args:
        q, bounds, batch: as for `attend.products_on_cpu`.
        scale, softcap: as in `paged_attention`.
        k_scale: (Hkv,) fp32, of fp8 pages.
    """
    kv_heads, head_dim = bounds.shape[2], q.shape[2]
    limit = cdiv(max(1, batch.max_context_len), KEY_BLOCK)
    found = torch.empty((*q.shape[:2], limit), dtype=torch.float32, device=q.device)
    best = torch.empty((q.shape[0], kv_heads, limit), dtype=torch.float32, device=q.device)
    block_n = 32 if head_dim <= 256 else 16  # the bounds of a block of keys are in registers
    launch(
        score_kernel,
        (cdiv(limit, block_n), kv_heads, batch.size),
        q,
        bounds,
        found,
        best,
        found if k_scale is None else k_scale,
        batch.cu_seqlens_q,
        batch.context_lens,
        batch.page_table,
        q.stride(0),
        q.stride(1),
        batch.page_table.stride(0),
        limit,
        float(scale),
        float(softcap or 0.0),
        GROUP=q.shape[1] // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        BLOCK_N=block_n,
        BLOCK_SIZE=KEY_BLOCK,
        BLOCKS_OF_PAGE=bounds.shape[1],
        SCALED=k_scale is not None,
        SOFTCAP=softcap is not None,
        num_warps=4,
    )
    return found, best
