"""The forward kernel in plain Triton: dense, ragged and paged batches, one program a query tile and head.

FlashAttention-2 (Dao 2023, algorithm 1): a program holds one tile of queries, walks the key tiles that the mask leaves,
ascending, and keeps a running maximum and sum. Masks are evaluated on boundary tiles only. The order of key tiles
depends on nothing but their absolute position, so a query's result is the same bits however its prompt is chunked.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longreach_kernels.backends.triton.arguments import NUMBERS
from longreach_kernels.backends.triton.primitives import (
    LN2,
    LOG2E,
    band_allows,
    bits_allow,
    load_rows,
    online_softmax,
    tile_pointers,
)
from longreach_kernels.backends.triton.programs import (
    find_query_tile,
    first_entry,
    head_offset,
    next_entry,
    split_span,
    visit,
)


class _Running(NamedTuple):
    """Of each query: the sum of weighted values, the maximum of the logits (log2 units), the sum of weights."""

    acc: Any
    row_max: Any
    row_sum: Any


class _Keys(NamedTuple):
    """The keys of one head of a sequence, and what masks them."""

    k_base: Any
    v_base: Any
    table: Any
    num_keys: Any
    k_strides: Any
    v_strides: Any
    window: Any
    sinks: Any
    scale_log2: Any
    softcap_log2: Any


@triton.jit
def _walk(running, q, span, keys, lists, q_positions, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Add the key tiles of a span; not MASKED: none of them needs masking or bounds. Of lists, the entries say."""
    offs_m = tl.arange(0, FORM.block_m)
    offs_n = tl.arange(0, FORM.block_n)
    offs_d = tl.arange(0, FORM.block_d)
    entry = first_entry(span, lists, FORM)
    for i in range(span.start, span.end):
        tile, partial = visit(span, entry, FORM)
        places = tile * FORM.block_n + offs_n
        k_ptrs = tile_pointers(
            keys.k_base, keys.table, tile, offs_n, offs_d, keys.num_keys, keys.k_strides, FORM.block_n, FORM.page_size
        )
        k = load_rows(k_ptrs, places, offs_d, keys.num_keys, FORM.head_dim, FORM.block_d, MASKED).to(q.dtype)
        qk = tl.dot(q, tl.trans(k), input_precision=FORM.precision)
        if FORM.listed:
            if partial:  # loads behind a branch stay out of the pipeline, whose buffers are for K and V
                index = tl.load(lists.bit_index + i)
                allowed = bits_allow(lists.bits, index, offs_m[:, None], offs_n[None, :], FORM)
                qk = tl.where(allowed, qk, float("-inf"))
        elif MASKED:
            allowed = band_allows(q_positions[:, None], places[None, :], keys.num_keys, keys.window, keys.sinks, FORM)
            qk = tl.where(allowed, qk, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax(
            qk, running.row_max, running.row_sum, keys.scale_log2, keys.softcap_log2, FORM.softcap
        )
        acc = running.acc * alpha[:, None]
        v_ptrs = tile_pointers(
            keys.v_base, keys.table, tile, offs_n, offs_d, keys.num_keys, keys.v_strides, FORM.block_n, FORM.page_size
        )
        v = load_rows(v_ptrs, places, offs_d, keys.num_keys, FORM.head_dim, FORM.block_d, MASKED).to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=FORM.precision)
        running = _Running(acc, row_max, row_sum)
        entry = next_entry(span, lists, i, FORM)
    return running


@triton.jit(
    do_not_specialize=NUMBERS,
    do_not_specialize_on_alignment=["CuQ", "CuK", "ContextLens", "Table"],
)
def forward_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    SinkLogits,
    KScale,
    VScale,
    CuQ,
    CuK,
    ContextLens,
    Table,
    lists,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    l_strides,
    stride_table,
    num_seqs,
    dense_queries,
    dense_keys,
    window,
    sinks,
    scale_log2,
    softcap_log2,
    section,
    FORM: tl.constexpr,
):
    """Grid (Hq, query tiles). Dense: strides are (batch, head, token). Ragged: queries by CuQ, keys by CuK or by pages;
    with pages the first stride of K and V is that of pages. Lists are those of the same batch."""
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_D: tl.constexpr = FORM.block_d
    head, place, span = find_query_tile(
        lists, CuQ, CuK, ContextLens, num_seqs, dense_queries, dense_keys, window, sinks, section, FORM
    )
    tile_m = place.tile
    num_queries = place.num_queries
    num_keys = place.num_keys
    if tile_m * BLOCK_M >= num_queries:
        return
    kv_head = head // FORM.group
    k_base = K + head_offset(place.batch, kv_head, place.k_row, k_strides)
    v_base = V + head_offset(place.batch, kv_head, place.k_row, v_strides)
    if FORM.kv_scales:  # of 8-bit keys; they factor out of the products
        scale_log2 *= tl.load(KScale + kv_head)
    table = Table + place.seq.to(tl.int64) * stride_table
    keys = _Keys(k_base, v_base, table, num_keys, k_strides, v_strides, window, sinks, scale_log2, softcap_log2)

    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row_mask = offs_m[:, None] < num_queries
    if FORM.head_dim != BLOCK_D:
        row_mask = row_mask & (offs_d[None, :] < FORM.head_dim)
    rows = offs_m.to(tl.int64)
    q_ptrs = Q + head_offset(place.batch, head, place.q_row, q_strides) + rows[:, None] * q_strides[2] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=row_mask, other=0.0)
    q_positions = num_keys - num_queries + offs_m
    running = _Running(
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    if FORM.listed:
        running = _walk(running, q, span, keys, lists, q_positions, FORM, True)
    else:  # loops of their own: loads without bounds, and no branch, where nothing is masked
        left, middle, right = split_span(span)
        if FORM.windowed:
            running = _walk(running, q, left, keys, lists, q_positions, FORM, True)
        running = _walk(running, q, middle, keys, lists, q_positions, FORM, False)
        running = _walk(running, q, right, keys, lists, q_positions, FORM, True)
    acc, row_max, row_sum = running

    if FORM.sink_logits:  # one more column of the softmax, without a value
        sink = tl.load(SinkLogits + head).to(tl.float32) * LOG2E
        max_new = tl.maximum(row_max, sink)
        alpha = tl.exp2(row_max - max_new)
        row_sum = row_sum * alpha + tl.exp2(sink - max_new)
        acc = acc * alpha[:, None]
        row_max = max_new
    seen = row_sum > 0.0
    out = acc / tl.where(seen, row_sum, 1.0)[:, None]
    if FORM.kv_scales:
        out *= tl.load(VScale + kv_head)
    lse = tl.where(seen, (row_max + tl.log2(tl.where(seen, row_sum, 1.0))) * LN2, float("-inf"))
    o_base = Out + head_offset(place.batch, head, place.q_row, o_strides)
    tl.store(o_base + rows[:, None] * o_strides[2] + offs_d[None, :], out.to(Out.dtype.element_ty), mask=row_mask)
    l_base = Lse + head_offset(place.batch, head, place.q_row, l_strides)
    tl.store(l_base + rows * l_strides[2], lse, mask=offs_m < num_queries)
