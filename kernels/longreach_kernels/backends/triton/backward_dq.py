"""The backward kernel for dQ in plain Triton: one program a query tile and head, as the forward kernel."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longreach_kernels.backends.triton.arguments import NUMBERS
from longreach_kernels.backends.triton.backward_rows import (
    Numbers,
    capped_slope,
    load_statistics,
    load_tokens,
    store_tokens,
)
from longreach_kernels.backends.triton.primitives import band_allows, bits_allow, logits_log2
from longreach_kernels.backends.triton.programs import find_query_tile, first_entry, head_offset, next_entry, visit


class _Queries(NamedTuple):
    """A query tile and its statistics, and the keys of its head."""

    q: Any
    grad: Any
    lse: Any
    delta: Any
    positions: Any
    k_base: Any
    v_base: Any
    num_keys: Any
    stride_k: Any
    stride_v: Any


@triton.jit
def _walk_keys(dq, queries, span, lists, numbers, FORM: tl.constexpr):
    """Add the key tiles of a span to dQ."""
    offs_m = tl.arange(0, FORM.block_m)
    offs_n = tl.arange(0, FORM.block_n)
    offs_d = tl.arange(0, FORM.block_d)
    entry = first_entry(span, lists, FORM)
    for i in range(span.start, span.end):
        tile, partial = visit(span, entry, FORM)
        keys = tile * FORM.block_n + offs_n
        k = load_tokens(queries.k_base, keys, queries.stride_k, offs_d, queries.num_keys, FORM)
        v = load_tokens(queries.v_base, keys, queries.stride_v, offs_d, queries.num_keys, FORM)
        qk = tl.dot(queries.q, tl.trans(k), input_precision=FORM.precision)
        logits = logits_log2(qk, numbers.scale_log2, numbers.softcap_log2, FORM.softcap)
        p = tl.exp2(logits - queries.lse[:, None])
        if partial:
            if FORM.listed:
                index = tl.load(lists.bit_index + i)
                allowed = bits_allow(lists.bits, index, offs_m[:, None], offs_n[None, :], FORM)
            else:
                positions = queries.positions[:, None]
                allowed = band_allows(positions, keys[None, :], queries.num_keys, numbers.window, numbers.sinks, FORM)
            p = tl.where(allowed, p, 0.0)
        dp = tl.dot(queries.grad, tl.trans(v), input_precision=FORM.precision)
        ds = capped_slope(p * (dp - queries.delta[:, None]), logits, numbers.softcap_log2, FORM.softcap)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=FORM.precision)
        entry = next_entry(span, lists, i, FORM)
    return dq


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["CuQ", "CuK"])
def dq_kernel(
    Q,
    K,
    V,
    GradOut,
    Lse,
    Delta,
    GradQ,
    CuQ,
    CuK,
    lists,
    q_strides,
    k_strides,
    v_strides,
    g_strides,
    l_strides,
    dq_strides,
    num_seqs,
    dense_queries,
    dense_keys,
    window,
    sinks,
    scale,
    scale_log2,
    softcap_log2,
    section,
    FORM: tl.constexpr,
):
    """Grid (Hq, query tiles)."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_D: tl.constexpr = FORM.block_d
    head, place, span = find_query_tile(
        lists, CuQ, CuK, None, num_seqs, dense_queries, dense_keys, window, sinks, section, FORM
    )
    tile_m = place.tile
    num_queries = place.num_queries
    num_keys = place.num_keys
    if tile_m * BLOCK_M >= num_queries:
        return
    kv_head = head // FORM.group
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q_base = Q + head_offset(place.batch, head, place.q_row, q_strides)
    g_base = GradOut + head_offset(place.batch, head, place.q_row, g_strides)
    l_offset = head_offset(place.batch, head, place.q_row, l_strides)
    lse, delta = load_statistics(Lse + l_offset, Delta + l_offset, offs_m, l_strides[2], num_queries)
    queries = _Queries(
        load_tokens(q_base, offs_m, q_strides[2], offs_d, num_queries, FORM),
        load_tokens(g_base, offs_m, g_strides[2], offs_d, num_queries, FORM),
        lse,
        delta,
        num_keys - num_queries + offs_m,
        K + head_offset(place.batch, kv_head, place.k_row, k_strides),
        V + head_offset(place.batch, kv_head, place.k_row, v_strides),
        num_keys,
        k_strides[2],
        v_strides[2],
    )
    numbers = Numbers(window, sinks, scale_log2, softcap_log2)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dq = _walk_keys(dq, queries, span, lists, numbers, FORM)
    base = GradQ + head_offset(place.batch, head, place.q_row, dq_strides)
    store_tokens(base, offs_m, dq_strides[2], offs_d, num_queries, dq * scale, FORM.head_dim)
