# pyright: reportGeneralTypeIssues=false
# (the stubs give device functions that return a tuple of tl values the type NoReturn)
"""The backward kernels in plain Triton: dQ by query tiles, dK and dV by key tiles; deterministic, no atomics.

FlashAttention-2 (Dao 2023, algorithm 2), split in two: with the saved log-sum-exp L and
``delta = rowsum(dO * O) - dL``,

    P = exp(S - L)    dV = P^T dO    dS = P * (dO V^T - delta)    dQ = scale * dS K    dK = scale * dS^T Q

each tile of P is computed again where it is needed. A program of the dK/dV kernel sums over the query heads of its KV
head's group itself, so no sum crosses programs. Rows that saw nothing have L = -inf, read here as +inf: P is then 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.masks import Full, Mask
from longreach_kernels.tile_lists import tile_lists

from .config import backward_configs, capability, cdiv, launch, sparse_backward_config
from .forward import closed_form, list_tensors, logit_scales
from .primitives import LOG2E, band_allows, bits_allow, find_sequence, key_tile_ranges, logits_log2


@triton.jit
def _delta_kernel(
    Out,
    GradOut,
    GradLse,
    Delta,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_lb,
    stride_lh,
    stride_lt,
    stride_glb,
    stride_glh,
    stride_glt,
    num_queries,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """Grid (row tiles, Hq, B): delta = rowsum(dO * O) - dL."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    seq = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < num_queries) & (offs_d[None, :] < HEAD_DIM)
    out = tl.load(
        Out + seq * stride_ob + head * stride_oh + rows[:, None] * stride_ot + offs_d[None, :], mask=inside, other=0.0
    )
    grad = tl.load(
        GradOut + seq * stride_gb + head * stride_gh + rows[:, None] * stride_gt + offs_d[None, :],
        mask=inside,
        other=0.0,
    )
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        place = GradLse + seq * stride_glb + head * stride_glh + rows * stride_glt
        delta -= tl.load(place, mask=rows < num_queries, other=0.0)
    tl.store(Delta + seq * stride_lb + head * stride_lh + rows * stride_lt, delta, mask=rows < num_queries)


@triton.jit
def _load_rows(base, rows, stride, offs_d, limit, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr):
    """Rows of a (tokens, channels) matrix, 0 beyond its end."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + offs_d[None, :]
    if CHECK:
        if HEAD_DIM == BLOCK_D:
            x = tl.load(pointers, mask=rows[:, None] < limit, other=0.0)
        else:
            x = tl.load(pointers, mask=(rows[:, None] < limit) & (offs_d[None, :] < HEAD_DIM), other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            x = tl.load(pointers)
        else:
            x = tl.load(pointers, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    return x


@triton.jit
def _load_statistics(l_base, d_base, rows, stride, limit):
    """L in log2 units, +inf for rows beyond the end or that saw nothing, and delta."""
    lse = tl.load(l_base + rows.to(tl.int64) * stride, mask=rows < limit, other=float("inf")) * LOG2E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(d_base + rows.to(tl.int64) * stride, mask=rows < limit, other=0.0)
    return lse, delta


@triton.jit
def _capped_slope(ds, logits, softcap_log2, SOFTCAP: tl.constexpr):
    """Times the derivative of the softcap, 1 - tanh^2."""
    if SOFTCAP:
        tanh = logits / softcap_log2
        ds = ds * (1.0 - tanh * tanh)
    return ds


@triton.jit
def _walk_keys(
    dq,
    q,
    grad,
    lse,
    delta,
    start,
    end,
    k_base,
    v_base,
    stride_kt,
    stride_vt,
    Tiles,
    BitIndex,
    Bits,
    q_positions,
    num_keys,
    window,
    sinks,
    scale_log2,
    softcap_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the key tiles ``start <= tile < end``, or those that a list holds at these places, to dQ."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    for i in range(start, end):
        tile = i
        if LISTED:
            tile = tl.load(Tiles + i)
        keys = tile * BLOCK_N + offs_n
        k = _load_rows(k_base, keys, stride_kt, offs_d, num_keys, HEAD_DIM, BLOCK_D, MASKED)
        v = _load_rows(v_base, keys, stride_vt, offs_d, num_keys, HEAD_DIM, BLOCK_D, MASKED)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        logits = logits_log2(qk, scale_log2, softcap_log2, SOFTCAP)
        p = tl.exp2(logits - lse[:, None])
        if MASKED:
            if LISTED:
                bits = tl.load(BitIndex + i)
                allowed = bits_allow(Bits, bits, offs_m[:, None], offs_n[None, :], BLOCK_M, BLOCK_N)
            else:
                allowed = band_allows(q_positions, keys, num_keys, window, sinks, CAUSAL, WINDOWED)
            p = tl.where(allowed, p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        ds = _capped_slope(p * (dp - delta[:, None]), logits, softcap_log2, SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


_SKIP = ["num_seqs", "dense_queries", "dense_keys", "window", "sinks", "list_stride"]


@triton.jit(do_not_specialize=_SKIP, do_not_specialize_on_alignment=["CuQ", "CuK"])
def _dq_kernel(
    Q,
    K,
    V,
    GradOut,
    Lse,
    Delta,
    GradQ,
    CuQ,
    CuK,
    FullStart,
    FullTiles,
    PartStart,
    PartTiles,
    PartBits,
    Bits,
    Order,
    list_stride,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_lb,
    stride_lh,
    stride_lt,
    stride_dqb,
    stride_dqh,
    stride_dqt,
    num_seqs,
    dense_queries,
    dense_keys,
    window,
    sinks,
    scale,
    scale_log2,
    softcap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (Hq, query tiles), as the forward kernel."""
    head = tl.program_id(0)
    slot = tl.num_programs(1) - 1 - tl.program_id(1)
    if RAGGED:
        seq, first_slot = find_sequence(CuQ, num_seqs, slot, BLOCK_M)
        tile_m = slot - first_slot
        q_row = tl.load(CuQ + seq).to(tl.int64)
        k_row = tl.load(CuK + seq).to(tl.int64)
        num_queries = tl.load(CuQ + seq + 1) - tl.load(CuQ + seq)
        num_keys = tl.load(CuK + seq + 1) - tl.load(CuK + seq)
        batch = tl.full((), 0, tl.int64)
    else:
        batch = (slot % num_seqs).to(tl.int64)
        tile_m = slot // num_seqs
        q_row = tl.full((), 0, tl.int64)
        k_row = tl.full((), 0, tl.int64)
        num_queries = dense_queries
        num_keys = dense_keys
        if LISTED:
            tile_m = tl.load(Order + head * list_stride + tl.num_programs(1) // num_seqs - 1 - tile_m)
    if tile_m * BLOCK_M >= num_queries:
        return
    q_head = head.to(tl.int64)
    kv_head = (head // GROUP).to(tl.int64)
    k_base = K + batch * stride_kb + kv_head * stride_kh + k_row * stride_kt
    v_base = V + batch * stride_vb + kv_head * stride_vh + k_row * stride_vt
    l_offset = batch * stride_lb + q_head * stride_lh + q_row * stride_lt
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q_base = Q + batch * stride_qb + q_head * stride_qh + q_row * stride_qt
    g_base = GradOut + batch * stride_gb + q_head * stride_gh + q_row * stride_gt
    q = _load_rows(q_base, offs_m, stride_qt, offs_d, num_queries, HEAD_DIM, BLOCK_D, True)
    grad = _load_rows(g_base, offs_m, stride_gt, offs_d, num_queries, HEAD_DIM, BLOCK_D, True)
    lse, delta = _load_statistics(Lse + l_offset, Delta + l_offset, offs_m, stride_lt, num_queries)

    low = num_keys - num_queries + tile_m * BLOCK_M
    high = num_keys - num_queries + tl.minimum((tile_m + 1) * BLOCK_M, num_queries)
    q_positions = num_keys - num_queries + offs_m
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # fmt: off
    if LISTED:
        row = head * list_stride + tile_m
        full_start = tl.load(FullStart + row)
        full_end = tl.load(FullStart + row + 1)
        part_start = tl.load(PartStart + row)
        part_end = tl.load(PartStart + row + 1)
        dq = _walk_keys(
            dq, q, grad, lse, delta, full_start, full_end, k_base, v_base, stride_kt, stride_vt, FullTiles, PartBits,
            Bits, q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, False,
        )
        dq = _walk_keys(
            dq, q, grad, lse, delta, part_start, part_end, k_base, v_base, stride_kt, stride_vt, PartTiles, PartBits,
            Bits, q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
        )
    else:
        sink_stop, first, inner, inner_end, stop = key_tile_ranges(
            low, high, num_keys, window, sinks, BLOCK_N, CAUSAL, WINDOWED
        )
        if SINKS:
            dq = _walk_keys(
                dq, q, grad, lse, delta, 0, sink_stop, k_base, v_base, stride_kt, stride_vt, FullTiles, PartBits,
                Bits, q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
            )
        if WINDOWED:
            dq = _walk_keys(
                dq, q, grad, lse, delta, first, inner, k_base, v_base, stride_kt, stride_vt, FullTiles, PartBits,
                Bits, q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
            )
        dq = _walk_keys(
            dq, q, grad, lse, delta, inner, inner_end, k_base, v_base, stride_kt, stride_vt, FullTiles, PartBits,
            Bits, q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, False,
        )
        dq = _walk_keys(
            dq, q, grad, lse, delta, inner_end, stop, k_base, v_base, stride_kt, stride_vt, FullTiles, PartBits,
            Bits, q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
        )
    # fmt: on
    place = GradQ + batch * stride_dqb + q_head * stride_dqh + (q_row + offs_m)[:, None] * stride_dqt + offs_d[None, :]
    inside = (offs_m[:, None] < num_queries) & (offs_d[None, :] < HEAD_DIM)
    tl.store(place, (dq * scale).to(GradQ.dtype.element_ty), mask=inside)


@triton.jit
def _walk_queries(
    dk,
    dv,
    k,
    v,
    keys,
    start,
    end,
    q_base,
    g_base,
    l_base,
    d_base,
    stride_qt,
    stride_gt,
    stride_lt,
    Tiles,
    BitIndex,
    Bits,
    num_queries,
    num_keys,
    window,
    sinks,
    scale_log2,
    softcap_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the query tiles ``start <= tile < end``, or those of a list, to dK and dV. Scores stand transposed: keys
    down, queries across. Keys beyond the end need no mask: their rows of dK and dV are never stored."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    for i in range(start, end):
        tile = i
        if LISTED:
            tile = tl.load(Tiles + i)
        rows = tile * BLOCK_M + offs_m
        q = _load_rows(q_base, rows, stride_qt, offs_d, num_queries, HEAD_DIM, BLOCK_D, MASKED)
        grad = _load_rows(g_base, rows, stride_gt, offs_d, num_queries, HEAD_DIM, BLOCK_D, MASKED)
        lse, delta = _load_statistics(l_base, d_base, rows, stride_lt, num_queries)
        kq = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        logits = logits_log2(kq, scale_log2, softcap_log2, SOFTCAP)
        p = tl.exp2(logits - lse[None, :])
        if MASKED:
            if LISTED:
                bits = tl.load(BitIndex + i)
                allowed = bits_allow(Bits, bits, offs_m[None, :], offs_n[:, None], BLOCK_M, BLOCK_N)
            else:
                positions = (rows + (num_keys - num_queries))[None, :]
                allowed = (keys < num_keys)[:, None]
                if CAUSAL:
                    allowed = allowed & (keys[:, None] <= positions)
                if WINDOWED:
                    allowed = allowed & ((keys[:, None] > positions - window) | (keys < sinks)[:, None])
            p = tl.where(allowed, p, 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        ds = _capped_slope(p * (dp - delta[None, :]), logits, softcap_log2, SOFTCAP)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=_SKIP, do_not_specialize_on_alignment=["CuQ", "CuK"])
def _dkdv_kernel(
    Q,
    K,
    V,
    GradOut,
    Lse,
    Delta,
    GradK,
    GradV,
    CuQ,
    CuK,
    FullStart,
    FullTiles,
    PartStart,
    PartTiles,
    PartBits,
    Bits,
    Order,
    list_stride,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_lb,
    stride_lh,
    stride_lt,
    stride_dkb,
    stride_dkh,
    stride_dkt,
    num_seqs,
    dense_queries,
    dense_keys,
    window,
    sinks,
    scale,
    scale_log2,
    softcap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (Hkv, key tiles). Under a causal mask early key tiles are long, so slots go upwards. Lists are those of
    `TileLists.transposed`; list_stride is the number of key tiles where heads have lists of their own, else 0."""
    kv_head = tl.program_id(0)
    slot = tl.program_id(1)
    if RAGGED:
        seq, first_slot = find_sequence(CuK, num_seqs, slot, BLOCK_N)
        tile_n = slot - first_slot
        q_row = tl.load(CuQ + seq).to(tl.int64)
        k_row = tl.load(CuK + seq).to(tl.int64)
        num_queries = tl.load(CuQ + seq + 1) - tl.load(CuQ + seq)
        num_keys = tl.load(CuK + seq + 1) - tl.load(CuK + seq)
        batch = tl.full((), 0, tl.int64)
    else:
        batch = (slot % num_seqs).to(tl.int64)
        tile_n = slot // num_seqs
        q_row = tl.full((), 0, tl.int64)
        k_row = tl.full((), 0, tl.int64)
        num_queries = dense_queries
        num_keys = dense_keys
        if LISTED:
            tile_n = tl.load(Order + kv_head * GROUP * list_stride + tile_n)
    if tile_n * BLOCK_N >= num_keys:
        return
    keys = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_head = kv_head.to(tl.int64)
    k_base = K + batch * stride_kb + k_head * stride_kh + k_row * stride_kt
    v_base = V + batch * stride_vb + k_head * stride_vh + k_row * stride_vt
    k = _load_rows(k_base, keys, stride_kt, offs_d, num_keys, HEAD_DIM, BLOCK_D, True)
    v = _load_rows(v_base, keys, stride_vt, offs_d, num_keys, HEAD_DIM, BLOCK_D, True)

    # Query tiles [low, inner) and [inner_end, high) need masking, [inner, inner_end) do not; ragged ones always do.
    offset = num_keys - num_queries
    first_key = tile_n * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, num_keys) - 1
    low = 0
    inner = 0
    high = tl.cdiv(num_queries, BLOCK_M)
    inner_end = num_queries // BLOCK_M
    if CAUSAL:
        low = tl.maximum(first_key - offset, 0) // BLOCK_M
        inner = tl.cdiv(tl.maximum(last_key - offset, 0), BLOCK_M)
    if WINDOWED:
        inner_end = tl.minimum(tl.maximum(first_key + window - offset, 0), num_queries) // BLOCK_M
        if first_key >= sinks:
            high = tl.cdiv(tl.minimum(tl.maximum(last_key + window - offset, 0), num_queries), BLOCK_M)
    low = tl.minimum(low, high)
    inner = tl.minimum(tl.maximum(inner, low), high)
    inner_end = tl.minimum(tl.maximum(inner_end, inner), high)

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_base = Q + batch * stride_qb + head.to(tl.int64) * stride_qh + q_row * stride_qt
        g_base = GradOut + batch * stride_gb + head.to(tl.int64) * stride_gh + q_row * stride_gt
        l_offset = batch * stride_lb + head.to(tl.int64) * stride_lh + q_row * stride_lt
        l_base = Lse + l_offset
        d_base = Delta + l_offset
        # fmt: off
        if LISTED:
            row = head * list_stride + tile_n
            full_start = tl.load(FullStart + row)
            full_end = tl.load(FullStart + row + 1)
            part_start = tl.load(PartStart + row)
            part_end = tl.load(PartStart + row + 1)
            dk, dv = _walk_queries(
                dk, dv, k, v, keys, full_start, full_end, q_base, g_base, l_base, d_base,
                stride_qt, stride_gt, stride_lt, FullTiles, PartBits, Bits, num_queries, num_keys, window, sinks,
                scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, False,
            )
            dk, dv = _walk_queries(
                dk, dv, k, v, keys, part_start, part_end, q_base, g_base, l_base, d_base,
                stride_qt, stride_gt, stride_lt, PartTiles, PartBits, Bits, num_queries, num_keys, window, sinks,
                scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
            )
        else:
            dk, dv = _walk_queries(
                dk, dv, k, v, keys, low, inner, q_base, g_base, l_base, d_base,
                stride_qt, stride_gt, stride_lt, FullTiles, PartBits, Bits, num_queries, num_keys, window, sinks,
                scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
            )
            dk, dv = _walk_queries(
                dk, dv, k, v, keys, inner, inner_end, q_base, g_base, l_base, d_base,
                stride_qt, stride_gt, stride_lt, FullTiles, PartBits, Bits, num_queries, num_keys, window, sinks,
                scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, False,
            )
            dk, dv = _walk_queries(
                dk, dv, k, v, keys, inner_end, high, q_base, g_base, l_base, d_base,
                stride_qt, stride_gt, stride_lt, FullTiles, PartBits, Bits, num_queries, num_keys, window, sinks,
                scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
            )
        # fmt: on
    place = batch * stride_dkb + k_head * stride_dkh + (k_row + keys)[:, None] * stride_dkt + offs_d[None, :]
    inside = (keys[:, None] < num_keys) & (offs_d[None, :] < HEAD_DIM)
    tl.store(GradK + place, (dk * scale).to(GradK.dtype.element_ty), mask=inside)
    tl.store(GradV + place, dv.to(GradV.dtype.element_ty), mask=inside)


def _strides(x: Tensor, ragged: bool) -> tuple[int, int, int]:
    """(batch, head, token) strides of x (B, H, N, ...) or, ragged, (T, H, ...)."""
    return (0, x.stride(1), x.stride(0)) if ragged else (x.stride(0), x.stride(1), x.stride(2))


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a dense batch, or of a ragged one where cu_seqlens are given; shapes as in the forward pass.

    Returns:
        dq, dk, dv like q, k, v (contiguous), and delta like lse, from which the gradient of sink logits follows.
    """
    ragged = cu_seqlens_q is not None
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    heads, head_dim = q.shape[1], q.shape[-1]
    kv_heads = k.shape[1]
    tokens, keys = (q.shape[0], k.shape[0]) if ragged else (q.shape[2], k.shape[2])
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    if tokens == 0 or keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), delta.zero_()
    block_d = max(16, triton.next_power_of_2(head_dim))
    launch(
        _delta_kernel,
        (cdiv(tokens, 64), heads, 1 if ragged else q.shape[0]),
        out,
        grad_out,
        grad_lse,
        delta,
        *_strides(out, ragged),
        *_strides(grad_out, ragged),
        *_strides(delta, ragged),
        *(_strides(grad_lse, ragged) if grad_lse is not None else (0, 0, 0)),
        tokens,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=64,
        HAS_GRAD_LSE=grad_lse is not None,
    )
    dq_config, dkdv_config = backward_configs(head_dim, q.dtype, capability(q.device))
    dq_lists = dkdv_lists = None
    if mask.band is None and not ragged:
        dq_config, dkdv_config = (sparse_backward_config(c, mask) for c in (dq_config, dkdv_config))
        lists = [tile_lists(mask, tokens, keys, c.block_m, c.block_n, q.device) for c in (dq_config, dkdv_config)]
        dq_lists, dkdv_lists = lists[0], lists[1].transposed
        band = Full().band
    else:
        band = closed_form(mask)
    num_seqs = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    scale_log2, softcap_log2 = logit_scales(scale, softcap)
    inputs = (q, k, v, grad_out, lse, delta)
    strides = [s for x in (q, k, v, grad_out, lse) for s in _strides(x, ragged)]
    numbers = (num_seqs, tokens, keys, band.window or 0, band.sinks, scale, scale_log2, softcap_log2)
    options = {
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "RAGGED": ragged,
        "LISTED": dq_lists is not None,
        "CAUSAL": band.causal,
        "WINDOWED": band.window is not None,
        "SOFTCAP": softcap is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }

    def tiles(length: int, block: int) -> int:
        return cdiv(length, block) + num_seqs if ragged else cdiv(length, block) * num_seqs

    launch(
        _dkdv_kernel,
        (kv_heads, tiles(keys, dkdv_config.block_n)),
        *inputs,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        *list_tensors(dkdv_lists),
        *strides,
        *_strides(dk, ragged),
        *numbers,
        **options,
        BLOCK_M=dkdv_config.block_m,
        BLOCK_N=dkdv_config.block_n,
        **dkdv_config.options(),
    )
    launch(
        _dq_kernel,
        (heads, tiles(tokens, dq_config.block_m)),
        *inputs,
        dq,
        cu_seqlens_q,
        cu_seqlens_k,
        *list_tensors(dq_lists),
        *strides,
        *_strides(dq, ragged),
        *numbers,
        **options,
        SINKS=band.window is not None and band.sinks > 0,
        BLOCK_M=dq_config.block_m,
        BLOCK_N=dq_config.block_n,
        **dq_config.options(),
    )
    return dq, dk, dv, delta
