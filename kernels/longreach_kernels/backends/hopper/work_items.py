"""Work items of the Hopper forward kernel: which queries, which key tiles, in which order.

A work item is one query tile of one head, and a step of it is one key tile. Items are numbered longest first; programs
take the next number whenever they have room for it. The producer and the consumers of a program each compute the item
from its number, so nothing but that and the tiles themselves has to pass between them.

Steps go from the right to the left, for a mask is densest at its right edge: first the tiles cut by the diagonal or by
the end of the keys, then those that need no mask, then those cut by the window's left edge, then the sinks. A mask that
is given as tile lists has its partial tiles first, from the last on.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Steps(NamedTuple):
    """The key tiles that an item walks.

    Attributes:
        count: how many; 0 if there is nothing to do.
        right, middle: steps before `right` and from `middle` on need a mask.
        last_tile, num_band: step i < num_band is key tile `last_tile - i`; the steps after that are the sinks'.
        sink_end: one past the last tile of the sinks.
        last_entry: of the item's row, for a mask given as lists, which is walked from its end: step i is entry
            `last_entry - i`.
    """

    count: Any
    right: Any
    middle: Any
    last_tile: Any
    num_band: Any
    sink_end: Any
    last_entry: Any


class Item(NamedTuple):
    """One query tile of one head.

    Attributes:
        steps: its key tiles.
        head: of the queries, within its sequence.
        q_outer, kv_outer: the head's index in the tensors of queries and of keys.
        q_row, k_row: first row of the tile, and of the sequence's keys, in those tensors.
        first: first query of the tile within its sequence.
        num_queries, num_keys: of the sequence.
        seq: the sequence.
        split: of its keys.
        part: of the values' channels.
    """

    steps: Any
    head: Any
    q_outer: Any
    kv_outer: Any
    q_row: Any
    k_row: Any
    first: Any
    num_queries: Any
    num_keys: Any
    seq: Any
    split: Any
    part: Any


@gluon.jit
def find_sequence(cu, num_seqs, slot, TILE: gl.constexpr):
    """The sequence whose tiles hold `slot`, and its first slot; see `triton.primitives.find_sequence`."""
    origin = gl.load(cu)
    low = gl.to_tensor(0)
    high = num_seqs
    while low + 1 < high:
        middle = (low + high) // 2
        if (gl.load(cu + middle) - origin) // TILE + middle <= slot:
            low = middle
        else:
            high = middle
    return low, (gl.load(cu + low) - origin) // TILE + low


@gluon.jit
def find_item(batch, index, FORM: gl.constexpr):
    """The item of that index; it has no steps where a ragged batch has fewer items than were allowed for."""
    BM: gl.constexpr = FORM.block_m
    BN: gl.constexpr = FORM.block_n
    PARTS: gl.constexpr = FORM.head_dim // FORM.value_dim
    seq = gl.to_tensor(0)
    split = gl.to_tensor(0)
    part = gl.to_tensor(0)
    if PARTS > 1:  # next to each other, since they read the same keys
        part = index % PARTS
        index = index // PARTS
    exists = gl.to_tensor(True)
    if FORM.ragged:
        head = index % batch.sizes.heads
        place = index // batch.sizes.heads
        if FORM.split:
            split = place % batch.split.num_splits
            place = place // batch.split.num_splits
        # The longest rows of a causal mask first, and what was allowed for but is not there last: a program that begins
        # with nothing finds that others have taken up, behind their first item, what it could do now.
        last_seq = batch.sizes.num_seqs - 1
        last_start = gl.load(batch.pages.cu_q + last_seq)
        slot = (last_start - gl.load(batch.pages.cu_q)) // BM + last_seq - 1 - place
        slot += gl.cdiv(gl.load(batch.pages.cu_q + batch.sizes.num_seqs) - last_start, BM)
        exists = slot >= 0
        slot = gl.maximum(slot, 0)
        seq, first_slot = find_sequence(batch.pages.cu_q, batch.sizes.num_seqs, slot, BM)
        q_start = gl.load(batch.pages.cu_q + seq)
        num_queries = gl.load(batch.pages.cu_q + seq + 1) - q_start
        tile = slot - first_slot
        if FORM.page_size:
            num_keys = gl.load(batch.pages.context_lens + seq)
            k_row = gl.to_tensor(0)
        else:
            k_row = gl.load(batch.pages.cu_k + seq)
            num_keys = gl.load(batch.pages.cu_k + seq + 1) - k_row
        q_outer = head
        kv_outer = head // FORM.group
    else:
        # Sections of heads, one after the other, whose keys and values stay in the L2 cache meanwhile.
        num_queries = batch.sizes.num_queries
        num_keys = batch.sizes.num_keys
        tiles = gl.cdiv(num_queries, BM)
        outer = batch.sizes.num_items // PARTS // tiles
        section = index // (batch.sizes.section * tiles)
        inside = index % (batch.sizes.section * tiles)
        size = gl.minimum(batch.sizes.section, outer - section * batch.sizes.section)
        q_outer = section * batch.sizes.section + inside % size
        head = q_outer % batch.sizes.heads
        kv_outer = q_outer // FORM.group
        tile = tiles - 1 - inside // size
        q_start = gl.to_tensor(0)
        k_row = gl.to_tensor(0)
    row = gl.to_tensor(0)
    if FORM.listed:
        tiles = gl.cdiv(num_queries, BM)
        row = head // batch.lists.sharing * tiles
        if FORM.ragged:
            row += gl.load(batch.lists.first_row + seq)
        if tile < tiles:  # of a sequence's tiles those with the longest lists first
            tile = gl.load(batch.lists.order + row + tiles - 1 - tile)
        row += tile
    first = tile * BM
    exists = exists & (first < num_queries)

    # The ranges of `tile_ranges.key_ranges`, for the queries at positions low <= q < high.
    zero = gl.to_tensor(0)
    last_tile = zero
    num_band = zero
    sink_end = zero
    last_entry = zero
    right = zero
    if FORM.listed:
        row = gl.where(exists, row, 0)
        last_entry = gl.load(batch.lists.start + row + 1) - 1
        right = last_entry + 1 - gl.load(batch.lists.partial + row)
        num_steps = last_entry + 1 - gl.load(batch.lists.start + row)
        if num_steps == 0:  # rows that see nothing visit one tile and mask all of it
            num_keys = zero
            num_steps = gl.to_tensor(1)
        middle = num_steps
    else:
        low = num_keys - num_queries + first
        high = num_keys - num_queries + gl.minimum(first + BM, num_queries)
        seen_end = num_keys
        full_end = num_keys
        if FORM.causal:
            seen_end = gl.maximum(gl.minimum(num_keys, high), 0)
            full_end = gl.maximum(gl.minimum(num_keys, low + 1), 0)
        stop = gl.maximum(gl.cdiv(seen_end, BN), 1)
        leftmost = zero
        inner = zero
        if FORM.windowed:
            leftmost = gl.minimum(gl.maximum(low - batch.sizes.window + 1, 0) // BN, stop - 1)
            inner = gl.minimum(gl.cdiv(gl.maximum(high - batch.sizes.window, 0), BN), stop)
            sink_end = gl.minimum(gl.cdiv(gl.minimum(batch.sizes.sinks, seen_end), BN), leftmost)
        inner_end = gl.minimum(gl.maximum(full_end // BN, inner), stop)
        last_tile = stop - 1
        right = stop - inner_end
        middle = stop - gl.maximum(inner, leftmost)
        num_band = stop - leftmost
        if FORM.split:
            tiles = gl.cdiv(num_keys, BN)
            split_tiles = gl.maximum(gl.cdiv(tiles, batch.split.num_splits), batch.split.least_tiles)
            split_tiles = gl.where(tiles <= batch.split.whole_tiles, tiles, split_tiles)
            begin = split * split_tiles
            end = gl.minimum(begin + split_tiles, stop)
            last_tile = end - 1
            right = gl.maximum(end - gl.maximum(inner_end, begin), 0)
            num_band = gl.maximum(end - begin, 0)
            middle = num_band
        num_steps = num_band + sink_end
    num_steps = gl.where(exists, num_steps, 0)
    steps = Steps(num_steps, right, middle, last_tile, num_band, sink_end, last_entry)
    q_row = q_start + first
    return Item(steps, head, q_outer, kv_outer, q_row, k_row, first, num_queries, num_keys, seq, split, part)


@gluon.jit
def tile_of(batch, item, step, FORM: gl.constexpr):
    """The key tile of a step."""
    if FORM.listed:
        tile = gl.to_tensor(0)
        if item.num_keys > 0:
            entry = gl.load(batch.lists.tiles + item.steps.last_entry - step)
            tile = gl.where(entry < 0, -1 - entry, entry)
    else:
        tile = item.steps.last_tile - step
        if FORM.windowed:
            tile = gl.where(step < item.steps.num_band, tile, item.steps.sink_end - 1 - (step - item.steps.num_band))
    return tile


@gluon.jit
def row_of(batch, item, tile, FORM: gl.constexpr):
    """The row where a key tile begins in the tensors of keys and values."""
    row = item.k_row + tile * FORM.block_n
    if FORM.page_size:
        # A page holds whole tiles, or a tile's box would run into a page of another sequence.
        page = gl.load(
            batch.pages.table + item.seq.to(gl.int64) * batch.pages.stride_table + tile * FORM.block_n // FORM.page_size
        )
        row = page * FORM.page_size + tile * FORM.block_n % FORM.page_size
    return row


@gluon.jit
def transposed_row(batch, item, tile, D: gl.constexpr):
    """The row where a key tile begins among transposed values, which have D rows for each tile (`transpose`)."""
    return (item.seq * batch.pages.tiles_of_seq + tile) * D
