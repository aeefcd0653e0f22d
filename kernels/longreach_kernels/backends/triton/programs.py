"""Which program works on what: the order of programs, the sequence and tile of one, and the tiles that it visits."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longreach_kernels.backends.triton.primitives import find_sequence


class Place(NamedTuple):
    """A sequence, its entry in a dense batch, its first rows in a ragged one, its lengths, and a tile of it."""

    seq: Any
    tile: Any
    batch: Any
    q_row: Any
    k_row: Any
    num_queries: Any
    num_keys: Any


class Span(NamedTuple):
    """The key tiles that a query tile visits, at places ``start <= i < end``; or query tiles by key tile.

    With lists, places are entries of them. Else the tile is ``i``, or ``i + skip`` from place ``sink_stop`` on, and
    tiles ``inner <= t < inner_end`` need no masking.
    """

    start: Any
    end: Any
    sink_stop: Any
    skip: Any
    inner: Any
    inner_end: Any


@triton.jit
def order_programs(section):
    """The (head, slot) of a program of a grid (heads, slots): ``section`` heads go through all slots, then the next
    ones, so that the keys in use at a time fit the L2 cache. ``section`` divides the heads."""
    slots = tl.num_programs(1)
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    size = section * slots
    within = place % size
    return place // size * section + within % section, within // section


@triton.jit
def find_place(
    Cu, CuQ, CuK, ContextLens, num_seqs, dense_queries, dense_keys, slot, BLOCK: tl.constexpr, FORM: tl.constexpr
):
    """The sequence and the tile of a slot; ``Cu`` is the one of CuQ and CuK whose tiles, of BLOCK rows, have slots."""
    zero = tl.full((), 0, tl.int64)
    if FORM.ragged:
        seq, first_slot = find_sequence(Cu, num_seqs, slot, BLOCK)
        q_row = tl.load(CuQ + seq)
        num_queries = tl.load(CuQ + seq + 1) - q_row
        if FORM.page_size:
            k_row = zero
            num_keys = tl.load(ContextLens + seq)
        else:
            k_row = tl.load(CuK + seq).to(tl.int64)
            num_keys = tl.load(CuK + seq + 1) - tl.load(CuK + seq)
        place = Place(seq, slot - first_slot, zero, q_row.to(tl.int64), k_row, num_queries, num_keys)
    else:
        seq = slot % num_seqs
        place = Place(seq, slot // num_seqs, seq.to(tl.int64), zero, zero, dense_queries, dense_keys)
    return place


@triton.jit
def head_offset(batch, head, row, strides):
    """Where a head's rows of a sequence start; ``strides`` are of (batch, head, row)."""
    return batch * strides[0] + head.to(tl.int64) * strides[1] + row * strides[2]


@triton.jit
def _first_row(lists, seq, head, num_tiles, FORM: tl.constexpr):
    row = (head // lists.sharing) * num_tiles
    if FORM.ragged:
        row += tl.load(lists.first_row + seq)
    return row


@triton.jit
def list_order(lists, seq, head, place, num_tiles, FORM: tl.constexpr):
    """The tile at a place, longest first, among the ``num_tiles`` of a sequence and head; ``num_tiles`` for others."""
    order = lists.order + _first_row(lists, seq, head, num_tiles, FORM)
    return tl.load(order + place, mask=(place >= 0) & (place < num_tiles), other=num_tiles)


@triton.jit
def list_span(lists, seq, head, tile, num_tiles, FORM: tl.constexpr):
    """The entries of a tile's list."""
    start = lists.start + _first_row(lists, seq, head, num_tiles, FORM) + tile
    exists = tile < num_tiles
    return Span(tl.load(start, mask=exists, other=0), tl.load(start + 1, mask=exists, other=0), 0, 0, 0, 0)


@triton.jit
def find_query_tile(
    lists,
    CuQ,
    CuK,
    ContextLens,
    num_seqs,
    dense_queries,
    dense_keys,
    window,
    sinks,
    section,
    FORM: tl.constexpr,
):
    """The head, the place and the key tiles of a program of a grid (Hq, query tiles), longest first.

    The tile may lie beyond the sequence's last: such a program has nothing to do."""
    head, slot = order_programs(section)
    # Under a causal mask late tiles are long; they go first, so that short ones fill the tail.
    slot = tl.num_programs(1) - 1 - slot
    at = find_place(CuQ, CuQ, CuK, ContextLens, num_seqs, dense_queries, dense_keys, slot, FORM.block_m, FORM)
    tile = at.tile
    if FORM.listed:
        num_tiles = tl.cdiv(at.num_queries, FORM.block_m)
        tile = list_order(lists, at.seq, head, num_tiles - 1 - tile, num_tiles, FORM)
        span = list_span(lists, at.seq, head, tile, num_tiles, FORM)
    else:
        low = at.num_keys - at.num_queries + tile * FORM.block_m
        high = at.num_keys - at.num_queries + tl.minimum((tile + 1) * FORM.block_m, at.num_queries)
        span = key_span(low, high, at.num_keys, window, sinks, FORM)
    return head, Place(at.seq, tile, at.batch, at.q_row, at.k_row, at.num_queries, at.num_keys), span


@triton.jit
def first_entry(span, lists, FORM: tl.constexpr):
    """The entry of the first place; without lists places are entries."""
    entry = span.start
    if FORM.listed:
        entry = tl.load(lists.tiles + span.start, mask=span.start < span.end, other=0)
    return entry


@triton.jit
def next_entry(span, lists, i, FORM: tl.constexpr):
    """The entry of the place after ``i``. A loop carries it, which loads it a step ahead without taking the place of a
    key tile in the pipeline."""
    entry = i + 1
    if FORM.listed:
        entry = tl.load(lists.tiles + i + 1, mask=i + 1 < span.end, other=0)
    return entry


@triton.jit
def visit(span, entry, FORM: tl.constexpr):
    """The tile of an entry, and whether it needs masking."""
    if FORM.listed:
        tile = entry ^ (entry >> 31)
        partial = entry < 0
    else:
        tile = entry
        if FORM.sinks:
            tile = tl.where(entry < span.sink_stop, entry, entry + span.skip)
        partial = (tile < span.inner) | (tile >= span.inner_end)
    return tile, partial


@triton.jit
def key_span(low, high, num_keys, window, sinks, FORM: tl.constexpr):
    """`tile_ranges.key_ranges` for the queries at positions ``low <= q < high``."""
    BLOCK_N: tl.constexpr = FORM.block_n
    seen_end = num_keys
    full_end = num_keys
    if FORM.causal:
        seen_end = tl.maximum(tl.minimum(num_keys, high), 0)
        full_end = tl.maximum(tl.minimum(num_keys, low + 1), 0)
    stop = tl.cdiv(seen_end, BLOCK_N)
    first = 0
    inner = 0
    sink_stop = 0
    if FORM.windowed:
        first = tl.minimum(tl.maximum(low - window + 1, 0) // BLOCK_N, stop)
        inner = tl.minimum(tl.cdiv(tl.maximum(high - window, 0), BLOCK_N), stop)
    if FORM.sinks:  # places count from the first sink
        sink_stop = tl.minimum(first, tl.cdiv(tl.minimum(sinks, seen_end), BLOCK_N))
        span = Span(0, sink_stop + stop - first, sink_stop, first - sink_stop, inner, full_end // BLOCK_N)
    else:
        span = Span(first, stop, 0, 0, inner, full_end // BLOCK_N)
    return span


@triton.jit
def split_span(span):
    """A span without lists in three: places that need masking, those that need none, and those that do again."""
    inner = tl.minimum(tl.maximum(span.inner - span.skip, span.start), span.end)
    inner_end = tl.minimum(tl.maximum(span.inner_end - span.skip, inner), span.end)
    return (
        Span(span.start, inner, span.sink_stop, span.skip, span.inner, span.inner_end),
        Span(inner, inner_end, span.sink_stop, span.skip, span.inner, span.inner_end),
        Span(inner_end, span.end, span.sink_stop, span.skip, span.inner, span.inner_end),
    )


@triton.jit
def query_span(first_key, last_key, num_queries, num_keys, window, sinks, FORM: tl.constexpr):
    """The query tiles that see the keys ``first_key <= k <= last_key``; ragged ones always need masking."""
    BLOCK_M: tl.constexpr = FORM.block_m
    offset = num_keys - num_queries
    first = 0
    inner = 0
    stop = tl.cdiv(num_queries, BLOCK_M)
    inner_end = num_queries // BLOCK_M
    if FORM.causal:
        first = tl.maximum(first_key - offset, 0) // BLOCK_M
        inner = tl.cdiv(tl.maximum(last_key - offset, 0), BLOCK_M)
    if FORM.windowed:
        inner_end = tl.minimum(tl.maximum(first_key + window - offset, 0), num_queries) // BLOCK_M
        if first_key >= sinks:
            stop = tl.cdiv(tl.minimum(tl.maximum(last_key + window - offset, 0), num_queries), BLOCK_M)
    return Span(first, stop, 0, 0, inner, inner_end)
