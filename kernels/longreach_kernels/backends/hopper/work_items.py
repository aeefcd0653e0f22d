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
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Batch:
    """What all items of a launch share. Pointers that a kind of batch does not use are never read.

    Dense batches have `num_queries` and `num_keys` tokens in every sequence, and their heads are numbered through the
    batch. In ragged ones `cu_q` (and `cu_k`, or `context_lens` and `table` where keys lie in pages) say where each
    sequence is. Of SPLIT ones an item is one of `num_parts` parts of its sequence's keys, of `least_tiles`
    tiles or more, or of all where these are at most `whole_tiles` (`forward_split`).
    """

    cu_q: gl.tensor
    cu_k: gl.tensor
    context_lens: gl.tensor
    table: gl.tensor
    stride_table: gl.tensor
    num_seqs: gl.tensor
    num_queries: gl.tensor
    num_keys: gl.tensor
    heads: gl.tensor
    section: gl.tensor
    num_items: gl.tensor
    window: gl.tensor
    sinks: gl.tensor
    first_row: gl.tensor
    start: gl.tensor
    partial: gl.tensor
    tiles: gl.tensor
    order: gl.tensor
    sharing: gl.tensor
    tiles_of_seq: gl.tensor
    num_parts: gl.tensor
    least_tiles: gl.tensor
    whole_tiles: gl.tensor
    GROUP: gl.constexpr
    BM: gl.constexpr
    BN: gl.constexpr
    RAGGED: gl.constexpr
    PAGE_SIZE: gl.constexpr
    LISTED: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOWED: gl.constexpr
    SPLIT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        cu_q,
        cu_k,
        context_lens,
        table,
        stride_table,
        num_seqs,
        num_queries,
        num_keys,
        heads,
        section,
        num_items,
        window,
        sinks,
        first_row,
        start,
        partial,
        tiles,
        order,
        sharing,
        tiles_of_seq,
        num_parts,
        least_tiles,
        whole_tiles,
        GROUP,
        BM,
        BN,
        RAGGED,
        PAGE_SIZE,
        LISTED,
        CAUSAL,
        WINDOWED,
        SPLIT,
    ):
        self.cu_q = cu_q
        self.cu_k = cu_k
        self.context_lens = context_lens
        self.table = table
        self.stride_table = stride_table
        self.num_seqs = num_seqs
        self.num_queries = num_queries
        self.num_keys = num_keys
        self.heads = heads
        self.section = section
        self.num_items = num_items
        self.window = window
        self.sinks = sinks
        self.first_row = first_row
        self.start = start
        self.partial = partial
        self.tiles = tiles
        self.order = order
        self.sharing = sharing
        self.tiles_of_seq = tiles_of_seq
        self.num_parts = num_parts
        self.least_tiles = least_tiles
        self.whole_tiles = whole_tiles
        self.GROUP = gl.constexpr(GROUP)
        self.BM = gl.constexpr(BM)
        self.BN = gl.constexpr(BN)
        self.RAGGED = gl.constexpr(RAGGED)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.LISTED = gl.constexpr(LISTED)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.WINDOWED = gl.constexpr(WINDOWED)
        self.SPLIT = gl.constexpr(SPLIT)


@aggregate
class Item:
    """One query tile of one head.

    Attributes:
        num_steps: key tiles to walk; 0 if there is nothing to do.
        right, middle: steps before `right` and from `middle` on need a mask.
        last_tile, num_band: step i < num_band is key tile `last_tile - i`; the steps after that are the sinks'.
        sink_end: one past the last tile of the sinks.
        last_entry: of the item's row, for a mask given as lists, which is walked from its end: step i is entry
            `last_entry - i`.
        head: of the queries, within its sequence; kv_head likewise.
        q_outer, kv_outer: the head's index in the tensors of queries and of keys.
        q_row, k_row: first row of the tile, and of the sequence's keys, in those tensors.
        first: first query of the tile within its sequence.
        num_queries, num_keys: of the sequence.
        seq: the sequence.
        part: of its keys.
    """

    num_steps: gl.tensor
    right: gl.tensor
    middle: gl.tensor
    last_tile: gl.tensor
    num_band: gl.tensor
    sink_end: gl.tensor
    last_entry: gl.tensor
    head: gl.tensor
    q_outer: gl.tensor
    kv_outer: gl.tensor
    q_row: gl.tensor
    k_row: gl.tensor
    first: gl.tensor
    num_queries: gl.tensor
    num_keys: gl.tensor
    seq: gl.tensor
    part: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        num_steps,
        right,
        middle,
        last_tile,
        num_band,
        sink_end,
        last_entry,
        head,
        q_outer,
        kv_outer,
        q_row,
        k_row,
        first,
        num_queries,
        num_keys,
        seq,
        part,
    ):
        self.num_steps = num_steps
        self.right = right
        self.middle = middle
        self.last_tile = last_tile
        self.num_band = num_band
        self.sink_end = sink_end
        self.last_entry = last_entry
        self.head = head
        self.q_outer = q_outer
        self.kv_outer = kv_outer
        self.q_row = q_row
        self.k_row = k_row
        self.first = first
        self.num_queries = num_queries
        self.num_keys = num_keys
        self.seq = seq
        self.part = part


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
def find_item(batch, index):
    """The item of that index; it has no steps where a ragged batch has fewer items than were allowed for."""
    BM: gl.constexpr = batch.BM
    BN: gl.constexpr = batch.BN
    seq = gl.to_tensor(0)
    part = gl.to_tensor(0)
    exists = gl.to_tensor(True)
    if batch.RAGGED:
        head = index % batch.heads
        place = index // batch.heads
        if batch.SPLIT:
            part = place % batch.num_parts
            place = place // batch.num_parts
        # The longest rows of a causal mask first, and what was allowed for but is not there last: a program that begins
        # with nothing finds that others have taken up, behind their first item, what it could do now.
        last_seq = batch.num_seqs - 1
        last_start = gl.load(batch.cu_q + last_seq)
        slot = (last_start - gl.load(batch.cu_q)) // BM + last_seq - 1 - place
        slot += gl.cdiv(gl.load(batch.cu_q + batch.num_seqs) - last_start, BM)
        exists = slot >= 0
        slot = gl.maximum(slot, 0)
        seq, first_slot = find_sequence(batch.cu_q, batch.num_seqs, slot, BM)
        q_start = gl.load(batch.cu_q + seq)
        num_queries = gl.load(batch.cu_q + seq + 1) - q_start
        tile = slot - first_slot
        if batch.PAGE_SIZE:
            num_keys = gl.load(batch.context_lens + seq)
            k_row = gl.to_tensor(0)
        else:
            k_row = gl.load(batch.cu_k + seq)
            num_keys = gl.load(batch.cu_k + seq + 1) - k_row
        q_outer = head
        kv_outer = head // batch.GROUP
    else:
        # Sections of heads, one after the other, whose keys and values stay in the L2 cache meanwhile.
        num_queries = batch.num_queries
        num_keys = batch.num_keys
        tiles = gl.cdiv(num_queries, BM)
        outer = batch.num_items // tiles
        section = index // (batch.section * tiles)
        inside = index % (batch.section * tiles)
        size = gl.minimum(batch.section, outer - section * batch.section)
        q_outer = section * batch.section + inside % size
        head = q_outer % batch.heads
        kv_outer = q_outer // batch.GROUP
        tile = tiles - 1 - inside // size
        q_start = gl.to_tensor(0)
        k_row = gl.to_tensor(0)
    row = gl.to_tensor(0)
    if batch.LISTED:
        tiles = gl.cdiv(num_queries, BM)
        row = head // batch.sharing * tiles
        if batch.RAGGED:
            row += gl.load(batch.first_row + seq)
        if tile < tiles:  # of a sequence's tiles those with the longest lists first
            tile = gl.load(batch.order + row + tiles - 1 - tile)
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
    if batch.LISTED:
        row = gl.where(exists, row, 0)
        last_entry = gl.load(batch.start + row + 1) - 1
        right = last_entry + 1 - gl.load(batch.partial + row)
        num_steps = last_entry + 1 - gl.load(batch.start + row)
        if num_steps == 0:  # rows that see nothing visit one tile and mask all of it
            num_keys = zero
            num_steps = gl.to_tensor(1)
        middle = num_steps
    else:
        low = num_keys - num_queries + first
        high = num_keys - num_queries + gl.minimum(first + BM, num_queries)
        seen_end = num_keys
        full_end = num_keys
        if batch.CAUSAL:
            seen_end = gl.maximum(gl.minimum(num_keys, high), 0)
            full_end = gl.maximum(gl.minimum(num_keys, low + 1), 0)
        stop = gl.maximum(gl.cdiv(seen_end, BN), 1)
        leftmost = zero
        inner = zero
        if batch.WINDOWED:
            leftmost = gl.minimum(gl.maximum(low - batch.window + 1, 0) // BN, stop - 1)
            inner = gl.minimum(gl.cdiv(gl.maximum(high - batch.window, 0), BN), stop)
            sink_end = gl.minimum(gl.cdiv(gl.minimum(batch.sinks, seen_end), BN), leftmost)
        inner_end = gl.minimum(gl.maximum(full_end // BN, inner), stop)
        last_tile = stop - 1
        right = stop - inner_end
        middle = stop - gl.maximum(inner, leftmost)
        num_band = stop - leftmost
        if batch.SPLIT:
            tiles = gl.cdiv(num_keys, BN)
            part_tiles = gl.maximum(gl.cdiv(tiles, batch.num_parts), batch.least_tiles)
            part_tiles = gl.where(tiles <= batch.whole_tiles, tiles, part_tiles)
            begin = part * part_tiles
            end = gl.minimum(begin + part_tiles, stop)
            last_tile = end - 1
            right = gl.maximum(end - gl.maximum(inner_end, begin), 0)
            num_band = gl.maximum(end - begin, 0)
            middle = num_band
        num_steps = num_band + sink_end
    num_steps = gl.where(exists, num_steps, 0)
    # fmt: off
    return Item(
        num_steps, right, middle, last_tile, num_band, sink_end, last_entry, head, q_outer, kv_outer,
        q_start + first, k_row, first, num_queries, num_keys, seq, part,
    )
    # fmt: on


@gluon.jit
def tile_of(batch, item, step):
    """The key tile of a step."""
    if batch.LISTED:
        tile = gl.to_tensor(0)
        if item.num_keys > 0:
            entry = gl.load(batch.tiles + item.last_entry - step)
            tile = gl.where(entry < 0, -1 - entry, entry)
    else:
        tile = item.last_tile - step
        if batch.WINDOWED:
            tile = gl.where(step < item.num_band, tile, item.sink_end - 1 - (step - item.num_band))
    return tile


@gluon.jit
def row_of(batch, item, tile):
    """The row where a key tile begins in the tensors of keys and values."""
    row = item.k_row + tile * batch.BN
    if batch.PAGE_SIZE:
        # A page holds whole tiles, or a tile's box would run into a page of another sequence.
        page = gl.load(batch.table + item.seq.to(gl.int64) * batch.stride_table + tile * batch.BN // batch.PAGE_SIZE)
        row = page * batch.PAGE_SIZE + tile * batch.BN % batch.PAGE_SIZE
    return row


@gluon.jit
def transposed_row(batch, item, tile, D: gl.constexpr):
    """The row where a key tile begins among transposed values, which have D rows for each tile (`transpose`)."""
    return (item.seq * batch.tiles_of_seq + tile) * D
