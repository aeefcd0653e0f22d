"""Paged decode with split-KV: one query a sequence, the keys in splits that run side by side and are merged.

Flash-Decoding (Dao et al. 2023). A program holds the queries of one KV head's group as the rows of one tile and walks
one split of the keys; a second kernel merges the splits in ascending order in fp32. Splits have a fixed size and lie
at absolute positions, so a sequence's result depends on nothing else in the batch. The grid is bounded by host
integers; programs beyond a sequence's true length leave at once, so the launch can be captured in a CUDA graph.
"""

# pyright: reportGeneralTypeIssues=false
# (the stubs give device functions that return a tuple of tl values the type NoReturn)
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.backends.triton.primitives import LN2, LOG2E, load_rows, online_softmax, tile_pointers


@triton.jit
def _layout(num_keys, window, sinks, SPLIT: tl.constexpr, WINDOWED: tl.constexpr):
    """Splits a query at the end of ``num_keys`` needs: some at the start (sinks), then from one on. With their count
    and the first key of the window."""
    sink_splits = 0
    first = 0
    low = 0
    if WINDOWED:
        low = tl.maximum(num_keys - window, 0)
        sink_splits = tl.cdiv(tl.minimum(sinks, low), SPLIT)
        first = tl.maximum(low // SPLIT, sink_splits)
    count = sink_splits + tl.maximum(tl.cdiv(num_keys, SPLIT) - first, 0)
    return sink_splits, first, count, low


@triton.jit(
    do_not_specialize=["stride_table", "pages_of_head", "window", "sinks", "num_splits"],
    do_not_specialize_on_alignment=["CuQ", "ContextLens", "Table"],
)
def split_kernel(
    Q,
    K,
    V,
    SplitOut,
    SplitLse,
    KScale,
    VScale,
    CuQ,
    ContextLens,
    Table,
    stride_qt,
    stride_qh,
    k_strides,
    v_strides,
    stride_table,
    pages_of_head,
    window,
    sinks,
    num_splits,
    scale_log2,
    softcap_log2,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (splits, Hkv, B): partial out (B, Hq, splits, D), normalised, and lse (B, Hq, splits) in log2 units."""
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    num_keys = tl.load(ContextLens + seq)
    sink_splits, first, count, low = _layout(num_keys, window, sinks, SPLIT, WINDOWED)
    if place >= count:
        return
    split = place
    if WINDOWED:
        split = tl.where(place < sink_splits, place, first + place - sink_splits)
    start = split * SPLIT
    end = tl.minimum(start + SPLIT, num_keys)
    if WINDOWED:
        # Skip the tiles of this split that lie before the window, unless a sink is among its keys.
        start = tl.where(start < sinks, start, tl.maximum(start, low // BLOCK_N * BLOCK_N))

    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    heads = kv_head * GROUP + offs_g
    row_mask = (offs_g[:, None] < GROUP) & (offs_d[None, :] < HEAD_DIM)
    q_row = tl.load(CuQ + seq).to(tl.int64)
    q = tl.load(Q + q_row * stride_qt + heads[:, None] * stride_qh + offs_d[None, :], mask=row_mask, other=0.0)

    if KV_SCALES:
        scale_log2 *= tl.load(KScale + kv_head)
    k_base = K + kv_head.to(tl.int64) * k_strides[1]
    v_base = V + kv_head.to(tl.int64) * v_strides[1]
    table = Table + seq.to(tl.int64) * stride_table + kv_head * pages_of_head
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_G,), tl.float32)
    for tile in range(start // BLOCK_N, tl.cdiv(end, BLOCK_N)):
        keys = tile * BLOCK_N + offs_n
        k_ptrs = tile_pointers(k_base, table, tile, offs_n, offs_d, num_keys, k_strides, BLOCK_N, PAGE_SIZE)
        k = load_rows(k_ptrs, keys, offs_d, num_keys, HEAD_DIM, BLOCK_D, True).to(q.dtype)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        allowed = keys < num_keys
        if WINDOWED:
            allowed = allowed & ((keys >= low) | (keys < sinks))
        qk = tl.where(allowed[None, :], qk, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax(qk, row_max, row_sum, scale_log2, softcap_log2, SOFTCAP)
        acc = acc * alpha[:, None]
        v_ptrs = tile_pointers(v_base, table, tile, offs_n, offs_d, num_keys, v_strides, BLOCK_N, PAGE_SIZE)
        v = load_rows(v_ptrs, keys, offs_d, num_keys, HEAD_DIM, BLOCK_D, True).to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    # A split that holds none of the keys in sight contributes a weight of 0.
    seen = row_sum > 0.0
    index = ((seq.to(tl.int64) * tl.num_programs(1) + kv_head) * GROUP + offs_g) * num_splits + place
    out = acc / tl.where(seen, row_sum, 1.0)[:, None]
    if KV_SCALES:
        out *= tl.load(VScale + kv_head)
    tl.store(SplitOut + index[:, None] * HEAD_DIM + offs_d[None, :], out, mask=row_mask)
    lse = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
    tl.store(SplitLse + index, lse, mask=offs_g < GROUP)


@triton.jit(do_not_specialize=["window", "sinks", "num_splits"], do_not_specialize_on_alignment=["CuQ", "ContextLens"])
def merge_kernel(
    SplitOut,
    SplitLse,
    Out,
    Lse,
    SinkLogits,
    CuQ,
    ContextLens,
    stride_ot,
    stride_oh,
    stride_lt,
    stride_lh,
    window,
    sinks,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
):
    """Grid (Hq, B): merge the splits of one row in blocks of BLOCK_S, ascending."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    row = tl.load(CuQ + seq).to(tl.int64)
    if row == tl.load(CuQ + seq + 1):  # a padding sequence without a row
        return
    num_keys = tl.load(ContextLens + seq)
    _, _, count, _ = _layout(num_keys, window, sinks, SPLIT, WINDOWED)
    offs_d = tl.arange(0, BLOCK_D)
    offs_s = tl.arange(0, BLOCK_S)
    base = (seq.to(tl.int64) * tl.num_programs(0) + head) * num_splits
    row_max = tl.full((), float("-inf"), tl.float32)
    row_sum = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    if SINK_LOGITS:
        row_max = tl.load(SinkLogits + head).to(tl.float32) * LOG2E
        row_sum = tl.full((), 1.0, tl.float32)
    for start in range(0, count, BLOCK_S):
        splits = start + offs_s
        lse = tl.load(SplitLse + base + splits, mask=splits < count, other=float("-inf"))
        max_new = tl.maximum(row_max, tl.max(lse, 0))
        safe = tl.where(max_new == float("-inf"), 0.0, max_new)
        weights = tl.exp2(lse - safe)
        alpha = tl.exp2(row_max - safe)
        out = tl.load(
            SplitOut + (base + splits)[:, None] * HEAD_DIM + offs_d[None, :],
            mask=(splits < count)[:, None] & (offs_d[None, :] < HEAD_DIM),
            other=0.0,
        )
        acc = acc * alpha + tl.sum(out * weights[:, None], 0)
        row_sum = row_sum * alpha + tl.sum(weights, 0)
        row_max = max_new
    seen = row_sum > 0.0
    safe_l = tl.where(seen, row_sum, 1.0)
    o_ptrs = Out + row * stride_ot + head * stride_oh + offs_d
    tl.store(o_ptrs, (acc / safe_l).to(Out.dtype.element_ty), mask=offs_d < HEAD_DIM)
    tl.store(Lse + row * stride_lt + head * stride_lh, tl.where(seen, (row_max + tl.log2(safe_l)) * LN2, float("-inf")))
