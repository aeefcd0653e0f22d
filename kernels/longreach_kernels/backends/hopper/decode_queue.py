"""The producer warp of the Hopper decode kernel: the queue of splits on the device, and the stream of their keys.

An item of the queue is a split of one sequence's keys for one KV head. Items are numbered through the batch by a prefix
sum over its lengths, which every program makes for itself, heads fastest: programs that run side by side read heads of
the same tokens, which are neighbours in memory. A program takes its first two items by its own number, the others from
a counter.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name until Triton 3.6

MESSAGE = gl.constexpr(16)  # numbers that tell the consumers of an item
DOUBLINGS = gl.constexpr(16)  # of a split's size, at most


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _plan(num_keys, window, sinks, WINDOWED: gl.constexpr, MIN_BITS: gl.constexpr, MAX_SPLITS: gl.constexpr):
    """Splits of a query at the end of `num_keys` keys; `decode_launch.most_splits` bounds their count.

    The logarithm of a split's size; how many splits hold sinks; the first split of the window; the count of both; and
    the window's first key. Works on scalars and on vectors of lengths.
    """
    low = num_keys * 0
    span = num_keys
    if WINDOWED:
        low = gl.maximum(num_keys - window, 0)
        span = num_keys - low
    bits = num_keys * 0 + MIN_BITS
    for i in gl.static_range(DOUBLINGS):
        bits += (span > (MAX_SPLITS << (MIN_BITS + i))).to(gl.int32)
    size = 1 << bits
    sink_splits = low
    first = low
    if WINDOWED:
        sink_splits = (gl.minimum(low, sinks) + size - 1) >> bits
        first = gl.maximum(low >> bits, sink_splits)
    return bits, sink_splits, first, sink_splits + gl.maximum(((num_keys + size - 1) >> bits) - first, 0), low


@gluon.jit
def _find_item(
    item,
    ends,
    lengths,
    cu_q,
    num_seqs,
    window,
    sinks,
    SEQS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BN: gl.constexpr,
    WINDOWED: gl.constexpr,
    MIN_BITS: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
):
    """Item number `item` of the queue; beyond its end something that may be looked up but not computed."""
    seqs = gl.arange(0, ends.shape[0], SEQS)
    seq = gl.minimum(gl.sum((ends <= item).to(gl.int32), 0), num_seqs - 1)
    index = item - gl.max(gl.where(ends <= item, ends, 0), 0)
    kv_head = index % KV_HEADS
    part = index // KV_HEADS
    num_keys = gl.sum(gl.where(seqs == seq, lengths, 0), 0)
    row = gl.load(cu_q + seq)
    bits, sink_splits, first, count, low = _plan(num_keys, window, sinks, WINDOWED, MIN_BITS, MAX_SPLITS)
    start = part << bits
    end = gl.minimum((part + 1) << bits, num_keys)
    if WINDOWED:
        if part < sink_splits:
            # Between the sinks and the window lies nothing to see.
            end = gl.where(end <= low, gl.minimum(end, sinks), end)
        else:
            start = (first + part - sink_splits) << bits
            end = gl.minimum(start + (1 << bits), num_keys)
            start = gl.where(start < sinks, start, gl.maximum(start, low // BN * BN))
    first_tile = start // BN
    # A sequence without keys has a tile too, all of it masked.
    num_tiles = gl.maximum((end + BN - 1) // BN - first_tile, 1)
    return seq, row, kv_head, part, first_tile, num_tiles, num_keys, gl.maximum(count, 1), low


@gluon.jit
def _find_rows(table, stride_table, seq, box, num_keys, lanes, BOX: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Rows of the pages where the 32 boxes from `box` on begin; boxes beyond the last key read that one's again."""
    boxes = gl.minimum(box + lanes, gl.maximum(num_keys - 1, 0) // BOX)
    pages = gl.load(table + seq.to(gl.int64) * stride_table + boxes * BOX // PAGE_SIZE)
    return pages * PAGE_SIZE + boxes * BOX % PAGE_SIZE


@gluon.jit
def _find_factor(scales, kv_head):
    """The bits of a head's scale; 0 where pages have none."""
    factor = 0
    if scales is not None:
        factor = gl.load(scales + kv_head).to(gl.int32, bitcast=True)
    return factor


@gluon.jit
def produce(
    q_desc,
    k_desc,
    v_desc,
    cu_q,
    context_lens,
    table,
    stride_table,
    k_scale,
    v_scale,
    counters,
    q_s,
    k_s,
    v_s,
    message_s,
    full,
    empty,
    message_full,
    message_empty,
    num_seqs,
    window,
    sinks,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    BOX: gl.constexpr,
    RING: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    MAX_SEQS: gl.constexpr,
    WINDOWED: gl.constexpr,
    MIN_BITS: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
):
    """The producer warp: takes items, tells the consumers, and streams their queries and tiles.

    While memory is busy a load takes longer than a tile: an item and its page ids are looked up one item ahead.
    """
    SEQS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BOXES: gl.constexpr = BN // BOX
    MESSAGES: gl.constexpr = q_s.shape[0]
    seqs = gl.arange(0, MAX_SEQS, SEQS)
    inside = seqs < num_seqs
    lengths = gl.load(context_lens + seqs, mask=inside, other=0)
    has_row = gl.load(cu_q + seqs + 1, mask=inside, other=0) > gl.load(cu_q + seqs, mask=inside, other=0)
    _, _, _, counts, _ = _plan(lengths, window, sinks, WINDOWED, MIN_BITS, MAX_SPLITS)
    # A sequence without keys still has an output to write; padding without a row has none.
    counts = gl.where(has_row, gl.maximum(counts, 1) * KV_HEADS, 0)
    ends = gl.associative_scan(counts, 0, _add)
    total = gl.sum(counts, 0)
    fields = gl.arange(0, MESSAGE, SEQS)
    lanes = gl.arange(0, 32, SEQS)

    # The first two items of each program are known; the queue on the device begins behind them.
    item = gl.program_id(0)
    next_item = item + gl.num_programs(0)
    seq, row, kv_head, part, first_tile, num_tiles, num_keys, count, low = _find_item(
        item, ends, lengths, cu_q, num_seqs, window, sinks, SEQS, KV_HEADS, BN, WINDOWED, MIN_BITS, MAX_SPLITS
    )
    page_rows = _find_rows(table, stride_table, seq, first_tile * BOXES, num_keys, lanes, BOX, PAGE_SIZE)
    k_factor = _find_factor(k_scale, kv_head)
    v_factor = _find_factor(v_scale, kv_head)
    items = 0
    tiles = 0
    while item < total:
        seq_1, row_1, kv_head_1, part_1, first_tile_1, num_tiles_1, num_keys_1, count_1, low_1 = _find_item(
            next_item, ends, lengths, cu_q, num_seqs, window, sinks, SEQS, KV_HEADS, BN, WINDOWED, MIN_BITS, MAX_SPLITS
        )
        page_rows_1 = _find_rows(table, stride_table, seq_1, first_tile_1 * BOXES, num_keys_1, lanes, BOX, PAGE_SIZE)
        k_factor_1 = _find_factor(k_scale, kv_head_1)
        v_factor_1 = _find_factor(v_scale, kv_head_1)

        slot = items % MESSAGES
        mbarrier.wait(message_empty.index(slot), ((items // MESSAGES) & 1) ^ 1)
        message = gl.where(fields == 0, seq, gl.where(fields == 1, row, gl.where(fields == 2, kv_head, part)))
        message = gl.where(fields == 4, first_tile, gl.where(fields == 5, num_tiles, message))
        message = gl.where(fields == 6, num_keys, gl.where(fields == 7, count, message))
        message = gl.where(fields == 8, low, message)
        if k_desc.dtype == gl.float8e4nv:
            message = gl.where(fields == 9, k_factor, gl.where(fields == 10, v_factor, message))
        message_s.index(slot).store(message)
        barrier()
        mbarrier.expect(message_full.index(slot), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [row, kv_head * GROUP, 0], message_full.index(slot), q_s.index(slot))

        for i in range(num_tiles):
            if (i > 0) & (i * BOXES % 32 == 0):
                page_rows = _find_rows(
                    table, stride_table, seq, (first_tile + i) * BOXES, num_keys, lanes, BOX, PAGE_SIZE
                )
            stage = (tiles + i) % RING
            mbarrier.wait(empty.index(stage), (((tiles + i) // RING) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * BOXES * k_desc.block_type.nbytes)
            k_boxes = k_s.index(stage)._reinterpret(k_desc.dtype, [BOXES, BOX, D], k_desc.layout)
            v_boxes = v_s.index(stage)._reinterpret(k_desc.dtype, [BOXES, BOX, D], k_desc.layout)
            for j in gl.static_range(BOXES):
                page_row = gl.sum(gl.where(lanes == i * BOXES % 32 + j, page_rows, 0), 0)
                tma.async_copy_global_to_shared(k_desc, [page_row, kv_head * D], full.index(stage), k_boxes.index(j))
                tma.async_copy_global_to_shared(v_desc, [page_row, kv_head * D], full.index(stage), v_boxes.index(j))
        tiles += num_tiles
        items += 1
        item = next_item
        seq, row, kv_head, part = seq_1, row_1, kv_head_1, part_1
        first_tile, num_tiles, num_keys, count, low = first_tile_1, num_tiles_1, num_keys_1, count_1, low_1
        page_rows, k_factor, v_factor = page_rows_1, k_factor_1, v_factor_1
        if next_item < total:
            next_item = gl.atomic_add(counters, 1, sem="relaxed") + 2 * gl.num_programs(0)
    slot = items % MESSAGES
    mbarrier.wait(message_empty.index(slot), ((items // MESSAGES) & 1) ^ 1)
    message_s.index(slot).store(gl.full([MESSAGE], -1, gl.int32, SEQS))
    barrier()
    mbarrier.arrive(message_full.index(slot), count=1)
    # The last program to find the queue empty leaves it as it was for the next launch.
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)
