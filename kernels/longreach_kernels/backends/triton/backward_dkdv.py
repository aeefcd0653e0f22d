"""The backward kernel for dK and dV in plain Triton: one program a key tile and KV head.

A program sums over the query heads of its KV head's group itself, so no sum crosses programs.
"""

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
from longreach_kernels.backends.triton.programs import (
    find_place,
    first_entry,
    head_offset,
    list_order,
    list_span,
    next_entry,
    order_programs,
    query_span,
    visit,
)


class _KeyTile(NamedTuple):
    """A key tile, and the queries of one head."""

    k: Any
    v: Any
    keys: Any
    q_base: Any
    g_base: Any
    l_base: Any
    d_base: Any
    num_queries: Any
    num_keys: Any
    stride_q: Any
    stride_g: Any
    stride_l: Any


@triton.jit
def _walk_queries(dk, dv, tile_n, span, lists, numbers, FORM: tl.constexpr):
    """Add the query tiles of a span to dK and dV. Scores stand transposed: keys down, queries across. Keys beyond the
    end need no mask: their rows are never stored."""
    offs_m = tl.arange(0, FORM.block_m)
    offs_n = tl.arange(0, FORM.block_n)
    offs_d = tl.arange(0, FORM.block_d)
    entry = first_entry(span, lists, FORM)
    for i in range(span.start, span.end):
        tile, partial = visit(span, entry, FORM)
        rows = tile * FORM.block_m + offs_m
        q = load_tokens(tile_n.q_base, rows, tile_n.stride_q, offs_d, tile_n.num_queries, FORM)
        grad = load_tokens(tile_n.g_base, rows, tile_n.stride_g, offs_d, tile_n.num_queries, FORM)
        lse, delta = load_statistics(tile_n.l_base, tile_n.d_base, rows, tile_n.stride_l, tile_n.num_queries)
        kq = tl.dot(tile_n.k, tl.trans(q), input_precision=FORM.precision)
        logits = logits_log2(kq, numbers.scale_log2, numbers.softcap_log2, FORM.softcap)
        p = tl.exp2(logits - lse[None, :])
        if partial:
            if FORM.listed:
                index = tl.load(lists.bit_index + i)
                allowed = bits_allow(lists.bits, index, offs_m[None, :], offs_n[:, None], FORM)
            else:
                positions = (rows + (tile_n.num_keys - tile_n.num_queries))[None, :]
                keys = tile_n.keys[:, None]
                allowed = band_allows(positions, keys, tile_n.num_keys, numbers.window, numbers.sinks, FORM)
            p = tl.where(allowed, p, 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=FORM.precision)
        dp = tl.dot(tile_n.v, tl.trans(grad), input_precision=FORM.precision)
        ds = capped_slope(p * (dp - delta[None, :]), logits, numbers.softcap_log2, FORM.softcap)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=FORM.precision)
        entry = next_entry(span, lists, i, FORM)
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["CuQ", "CuK"])
def dkdv_kernel(
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
    lists,
    q_strides,
    k_strides,
    v_strides,
    g_strides,
    l_strides,
    dk_strides,
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
    """Grid (Hkv, key tiles). Under a causal mask early key tiles are long, so slots go upwards. Lists are by keys.
    dK and dV have the same strides; ``section`` counts KV heads."""
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_D: tl.constexpr = FORM.block_d
    kv_head, slot = order_programs(section)
    place = find_place(CuK, CuQ, CuK, None, num_seqs, dense_queries, dense_keys, slot, BLOCK_N, FORM)
    num_queries = place.num_queries
    num_keys = place.num_keys
    num_tiles = tl.cdiv(num_keys, BLOCK_N)
    tile = place.tile
    if tile >= num_tiles:
        return
    if FORM.listed:  # the heads of a group have lists of their own; its first one's order serves all
        tile = list_order(lists, place.seq, kv_head * FORM.group, tile, num_tiles, FORM)
    first_key = tile * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_base = K + head_offset(place.batch, kv_head, place.k_row, k_strides)
    v_base = V + head_offset(place.batch, kv_head, place.k_row, v_strides)
    k = load_tokens(k_base, keys, k_strides[2], offs_d, num_keys, FORM)
    v = load_tokens(v_base, keys, v_strides[2], offs_d, num_keys, FORM)
    last_key = tl.minimum(first_key + BLOCK_N, num_keys) - 1
    span = query_span(first_key, last_key, num_queries, num_keys, window, sinks, FORM)
    numbers = Numbers(window, sinks, scale_log2, softcap_log2)

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(FORM.group):
        head = kv_head * FORM.group + member
        l_offset = head_offset(place.batch, head, place.q_row, l_strides)
        tile_n = _KeyTile(
            k,
            v,
            keys,
            Q + head_offset(place.batch, head, place.q_row, q_strides),
            GradOut + head_offset(place.batch, head, place.q_row, g_strides),
            Lse + l_offset,
            Delta + l_offset,
            num_queries,
            num_keys,
            q_strides[2],
            g_strides[2],
            l_strides[2],
        )
        if FORM.listed:
            span = list_span(lists, place.seq, head, tile, num_tiles, FORM)
        dk, dv = _walk_queries(dk, dv, tile_n, span, lists, numbers, FORM)
    dk_offset = head_offset(place.batch, kv_head, place.k_row, dk_strides)
    store_tokens(GradK + dk_offset, keys, dk_strides[2], offs_d, num_keys, dk * scale, FORM.head_dim)
    store_tokens(GradV + dk_offset, keys, dk_strides[2], offs_d, num_keys, dv, FORM.head_dim)
