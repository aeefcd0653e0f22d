"""Scores of blocks of keys by the attention of a few queries, in Triton: logits' weights by block, their sum for each
head, and the squared shares over heads. Values are not read."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.arguments import padded
from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.backends.triton.primitives import load_rows, tile_pointers
from longreach_kernels.batch import PagedBatch
from longreach_kernels.sizes import KEY_BLOCK

# What the weights of some queries may take at once, in bytes.
_MOST_BYTES = 32 << 20
_WIDE = 1024  # blocks that a program of the second kernel looks at together
_PART = 128  # blocks of a program of the third


@triton.jit(
    do_not_specialize=["stride_table", "limit", "scale", "softcap"],
    do_not_specialize_on_alignment=["ContextLens", "Table"],
)
def weights_kernel(
    Q,
    K,
    Weights,
    KScale,
    ContextLens,
    Table,
    stride_qt,
    stride_qh,
    k_strides,
    stride_table,
    limit,
    scale,
    softcap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles of keys, Hkv, R): ``Weights`` (R, Hq, limit) gets of each block the log-sum-exp of its logits, -inf
    beyond a sequence's end."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    num_keys = tl.load(ContextLens + row)
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    heads = kv_head * GROUP + offs_g
    block = tile * (BLOCK_N // BLOCK_SIZE) + tl.arange(0, BLOCK_N // BLOCK_SIZE)
    at = Weights + (row * (KV_HEADS * GROUP) + heads)[:, None] * limit + block[None, :]
    wanted = (offs_g[:, None] < GROUP) & (block[None, :] < limit)
    if tile * BLOCK_N >= num_keys:
        nothing = tl.full((BLOCK_G, BLOCK_N // BLOCK_SIZE), float("-inf"), tl.float32)
        tl.store(at, nothing, mask=wanted)
        return
    q_mask = (offs_g[:, None] < GROUP) & (offs_d[None, :] < HEAD_DIM)
    q = tl.load(Q + row * stride_qt + heads[:, None] * stride_qh + offs_d[None, :], mask=q_mask, other=0.0)
    factor = scale * tl.load(KScale + kv_head) if SCALED else scale
    keys = tile * BLOCK_N + offs_n
    base = K + kv_head.to(tl.int64) * k_strides[1]
    pointers = tile_pointers(
        base, Table + row * stride_table, tile, offs_n, offs_d, num_keys, k_strides, BLOCK_N, PAGE_SIZE
    )
    k = load_rows(pointers, keys, offs_d, num_keys, HEAD_DIM, BLOCK_D, True).to(q.dtype)
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    if SOFTCAP:
        logits = softcap * (1 - 2 / (tl.exp(2 * logits / softcap) + 1))  # tanh
    logits = tl.where((keys < num_keys)[None, :], logits, float("-inf"))
    by_block = tl.reshape(logits, (BLOCK_G, BLOCK_N // BLOCK_SIZE, BLOCK_SIZE))
    peak = tl.max(by_block, 2)
    at_least = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(by_block - at_least[:, :, None]), 2)
    found = tl.where(peak == float("-inf"), peak, at_least + tl.log(tl.maximum(total, 1e-30)))
    tl.store(at, found, mask=wanted)


@triton.jit(do_not_specialize=["limit"], do_not_specialize_on_alignment=["ContextLens"])
def total_kernel(
    Weights,
    Sinks,
    Totals,
    ContextLens,
    limit,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    """Grid (Hq, R): ``Totals`` (R, Hq) gets the log-sum-exp of a head's logits, its learned sink's included."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    count = tl.cdiv(tl.load(ContextLens + row), BLOCK_SIZE)
    at = Weights + (row * HEADS + head) * limit
    number = tl.arange(0, WIDE)
    peak = -1e38
    weight = 0.0
    if WITH_SINKS:
        peak = tl.load(Sinks + head).to(tl.float32)
        weight = 1.0
    for start in range(0, count, WIDE):
        weights = tl.load(at + start + number, mask=start + number < count, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(weights))
        weight = weight * tl.exp(peak - higher) + tl.sum(tl.exp(weights - higher))
        peak = higher
    tl.store(Totals + row * HEADS + head, peak + tl.log(tl.maximum(weight, 1e-30)))


@triton.jit(do_not_specialize=["limit", "stride_scores"], do_not_specialize_on_alignment=["ContextLens", "Scores"])
def square_kernel(
    Weights,
    Totals,
    Scores,
    ContextLens,
    limit,
    stride_scores,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr,
):
    """Grid (parts of the blocks, R): add to ``Scores`` (R, ...) the sum over heads of squared shares."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * PART + tl.arange(0, PART)
    inside = block < tl.cdiv(tl.load(ContextLens + row), BLOCK_SIZE)
    found = tl.zeros((PART,), tl.float32)
    for head in range(HEADS):
        at = row * HEADS + head
        weights = tl.load(Weights + at * limit + block, mask=inside, other=float("-inf"))
        share = tl.exp(weights - tl.load(Totals + at))
        found += share * share
    into = Scores + row * stride_scores + block
    tl.store(into, tl.load(into, mask=inside, other=0.0) + found, mask=inside)


def add_scores(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    scores: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    k_scale: Tensor | None,
) -> None:
    """As `attended.add_block_scores`, whose arguments have been checked."""
    (rows, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, k_pages.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    limit = cdiv(batch.max_context_len, KEY_BLOCK)
    at_once = min(rows, max(1, _MOST_BYTES // (4 * heads * limit)))
    weights = torch.empty((at_once, heads, limit), dtype=torch.float32, device=q.device)
    totals = torch.empty((at_once, heads), dtype=torch.float32, device=q.device)
    block_n = 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32
    for start in range(0, rows, at_once):
        count = min(at_once, rows - start)
        part, lens, table = (x[start : start + count] for x in (q, batch.context_lens, batch.page_table))
        launch(
            weights_kernel,
            (cdiv(limit * KEY_BLOCK, block_n), kv_heads, count),
            part,
            k_pages,
            weights,
            totals if k_scale is None else k_scale,
            lens,
            table,
            q.stride(0),
            q.stride(1),
            (k_pages.stride(0), k_pages.stride(2), k_pages.stride(1)),
            table.stride(0),
            limit,
            float(scale),
            float(softcap or 0.0),
            GROUP=heads // kv_heads,
            KV_HEADS=kv_heads,
            BLOCK_G=max(16, triton.next_power_of_2(heads // kv_heads)),
            HEAD_DIM=head_dim,
            BLOCK_D=padded(head_dim),
            BLOCK_N=block_n,
            BLOCK_SIZE=KEY_BLOCK,
            PAGE_SIZE=page_size,
            SCALED=k_scale is not None,
            SOFTCAP=softcap is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=4,
        )
        sinks = totals if sink_logits is None else sink_logits
        launch(
            total_kernel,
            (heads, count),
            weights,
            sinks,
            totals,
            lens,
            limit,
            HEADS=heads,
            BLOCK_SIZE=KEY_BLOCK,
            WIDE=_WIDE,
            WITH_SINKS=sink_logits is not None,
            num_warps=4,
        )
        launch(
            square_kernel,
            (cdiv(limit, _PART), count),
            weights,
            totals,
            scores[start:],
            lens,
            limit,
            scores.stride(0),
            HEADS=heads,
            BLOCK_SIZE=KEY_BLOCK,
            PART=_PART,
            num_warps=4,
        )
