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

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from longreach_kernels.backends.hopper.config import EARLY_SPLITS

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name until Triton 3.6

EARLY = gl.constexpr(EARLY_SPLITS)
MESSAGE = gl.constexpr(16)  # numbers that tell the consumers of an item


@gluon.jit
def _add(a, b):
    return a + b


class _Queue(NamedTuple):
    """The lengths of the sequences, and where their items end."""

    lengths: Any
    ends: Any


class _Item(NamedTuple):
    """One split of a sequence's keys for one KV head: `count` is that of the sequence's splits, `low` the first key of
    its window."""

    seq: Any
    row: Any
    kv_head: Any
    split: Any
    first_tile: Any
    num_tiles: Any
    num_keys: Any
    count: Any
    low: Any


@gluon.jit
def _plan(num_keys, sizes, FORM: gl.constexpr):
    """Splits of a query at the end of `num_keys` keys; `decode_launch.most_splits` bounds their count.

    A split's keys, a multiple of a tile's; how many splits hold sinks; the first split of the window; the count of
    both; and the window's first key. Works on scalars and on vectors of lengths.
    """
    low = num_keys * 0
    span = num_keys
    if FORM.windowed:
        low = gl.maximum(num_keys - sizes.window, 0)
        span = num_keys - low
    size = gl.minimum((span + EARLY - 1) // EARLY, 2 * sizes.least_keys)
    size = gl.maximum(gl.maximum((span + sizes.max_splits - 1) // sizes.max_splits, sizes.least_keys), size)
    size = (size + FORM.block_n - 1) // FORM.block_n * FORM.block_n
    sink_splits = low
    first = low
    if FORM.windowed:
        sink_splits = (gl.minimum(low, sizes.sinks) + size - 1) // size
        first = gl.maximum(low // size, sink_splits)
    return size, sink_splits, first, sink_splits + gl.maximum((num_keys + size - 1) // size - first, 0), low


@gluon.jit
def _find_item(item, queue, cu_q, sizes, SEQS: gl.constexpr, FORM: gl.constexpr):
    """Item number `item` of the queue; beyond its end something that may be looked up but not computed."""
    ends = queue.ends
    seqs = gl.arange(0, ends.shape[0], SEQS)
    seq = gl.minimum(gl.sum((ends <= item).to(gl.int32), 0), sizes.num_seqs - 1)
    index = item - gl.max(gl.where(ends <= item, ends, 0), 0)
    kv_head = index % FORM.kv_heads
    split = index // FORM.kv_heads
    num_keys = gl.sum(gl.where(seqs == seq, queue.lengths, 0), 0)
    row = gl.load(cu_q + seq)
    size, sink_splits, first, count, low = _plan(num_keys, sizes, FORM)
    start = split * size
    end = gl.minimum(start + size, num_keys)
    if FORM.windowed:
        if split < sink_splits:
            # Between the sinks and the window lies nothing to see.
            end = gl.where(end <= low, gl.minimum(end, sizes.sinks), end)
        else:
            start = (first + split - sink_splits) * size
            end = gl.minimum(start + size, num_keys)
            start = gl.where(start < sizes.sinks, start, gl.maximum(start, low // FORM.block_n * FORM.block_n))
    first_tile = start // FORM.block_n
    # A sequence without keys has a tile too, all of it masked.
    num_tiles = gl.maximum((end + FORM.block_n - 1) // FORM.block_n - first_tile, 1)
    return _Item(seq, row, kv_head, split, first_tile, num_tiles, num_keys, gl.maximum(count, 1), low)


@gluon.jit
def _find_rows(pages, seq, box, num_keys, lanes, FORM: gl.constexpr):
    """Rows of the pages where the 32 boxes from `box` on begin; boxes beyond the last key read that one's again."""
    boxes = gl.minimum(box + lanes, gl.maximum(num_keys - 1, 0) // FORM.box)
    page = gl.load(pages.table + seq.to(gl.int64) * pages.stride_table + boxes * FORM.box // FORM.page_size)
    return page * FORM.page_size + boxes * FORM.box % FORM.page_size


@gluon.jit
def _find_factor(scales, kv_head):
    """The bits of a head's scale; 0 where pages have none."""
    factor = 0
    if scales is not None:
        factor = gl.load(scales + kv_head).to(gl.int32, bitcast=True)
    return factor


@gluon.jit
def produce(q_desc, k_desc, v_desc, pages, scales, counters, sizes, buffers, FORM: gl.constexpr):
    """The producer warp: takes items, tells the consumers, and streams their queries and tiles.

    While memory is busy a load takes longer than a tile: an item and its page ids are looked up one item ahead.
    """
    SEQS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    RING: gl.constexpr = FORM.ring
    MESSAGES: gl.constexpr = FORM.messages
    BOXES: gl.constexpr = FORM.block_n // FORM.box
    D: gl.constexpr = FORM.head_dim
    seqs = gl.arange(0, FORM.max_seqs, SEQS)
    inside = seqs < sizes.num_seqs
    lengths = gl.load(pages.context_lens + seqs, mask=inside, other=0)
    has_row = gl.load(pages.cu_q + seqs + 1, mask=inside, other=0) > gl.load(pages.cu_q + seqs, mask=inside, other=0)
    _, _, _, counts, _ = _plan(lengths, sizes, FORM)
    # A sequence without keys still has an output to write; padding without a row has none.
    counts = gl.where(has_row, gl.maximum(counts, 1) * FORM.kv_heads, 0)
    queue = _Queue(lengths, gl.associative_scan(counts, 0, _add))
    total = gl.sum(counts, 0)
    fields = gl.arange(0, MESSAGE, SEQS)
    lanes = gl.arange(0, 32, SEQS)

    # The first two items of each program are known; the queue on the device begins behind them.
    index = gl.program_id(0)
    next_index = index + gl.num_programs(0)
    item = _find_item(index, queue, pages.cu_q, sizes, SEQS, FORM)
    page_rows = _find_rows(pages, item.seq, item.first_tile * BOXES, item.num_keys, lanes, FORM)
    k_factor = _find_factor(scales.k_scale, item.kv_head)
    v_factor = _find_factor(scales.v_scale, item.kv_head)
    items = 0
    tiles = 0
    while index < total:
        item_1 = _find_item(next_index, queue, pages.cu_q, sizes, SEQS, FORM)
        page_rows_1 = _find_rows(pages, item_1.seq, item_1.first_tile * BOXES, item_1.num_keys, lanes, FORM)
        k_factor_1 = _find_factor(scales.k_scale, item_1.kv_head)
        v_factor_1 = _find_factor(scales.v_scale, item_1.kv_head)

        slot = items % MESSAGES
        mbarrier.wait(buffers.message_empty.index(slot), ((items // MESSAGES) & 1) ^ 1)
        message = gl.where(
            fields == 0,
            item.seq,
            gl.where(fields == 1, item.row, gl.where(fields == 2, item.kv_head, item.split)),
        )
        message = gl.where(fields == 4, item.first_tile, gl.where(fields == 5, item.num_tiles, message))
        message = gl.where(fields == 6, item.num_keys, gl.where(fields == 7, item.count, message))
        message = gl.where(fields == 8, item.low, message)
        if k_desc.dtype == gl.float8e4nv:
            message = gl.where(fields == 9, k_factor, gl.where(fields == 10, v_factor, message))
        buffers.messages.index(slot).store(message)
        barrier()
        mbarrier.expect(buffers.message_full.index(slot), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            q_desc, [item.row, item.kv_head * FORM.group, 0], buffers.message_full.index(slot), buffers.q.index(slot)
        )

        for i in range(item.num_tiles):
            if (i > 0) & (i * BOXES % 32 == 0):
                box = (item.first_tile + i) * BOXES
                page_rows = _find_rows(pages, item.seq, box, item.num_keys, lanes, FORM)
            stage = (tiles + i) % RING
            mbarrier.wait(buffers.empty.index(stage), (((tiles + i) // RING) & 1) ^ 1)
            mbarrier.expect(buffers.full.index(stage), 2 * BOXES * k_desc.block_type.nbytes)
            k_boxes = buffers.k.index(stage)._reinterpret(k_desc.dtype, [BOXES, FORM.box, D], k_desc.layout)
            v_boxes = buffers.v.index(stage)._reinterpret(k_desc.dtype, [BOXES, FORM.box, D], k_desc.layout)
            for j in gl.static_range(BOXES):
                page_row = gl.sum(gl.where(lanes == i * BOXES % 32 + j, page_rows, 0), 0)
                tma.async_copy_global_to_shared(
                    k_desc, [page_row, item.kv_head * D], buffers.full.index(stage), k_boxes.index(j)
                )
                tma.async_copy_global_to_shared(
                    v_desc, [page_row, item.kv_head * D], buffers.full.index(stage), v_boxes.index(j)
                )
        tiles += item.num_tiles
        items += 1
        index = next_index
        item = item_1
        page_rows, k_factor, v_factor = page_rows_1, k_factor_1, v_factor_1
        if next_index < total:
            next_index = gl.atomic_add(counters, 1, sem="relaxed") + 2 * gl.num_programs(0)
    slot = items % MESSAGES
    mbarrier.wait(buffers.message_empty.index(slot), ((items // MESSAGES) & 1) ^ 1)
    buffers.messages.index(slot).store(gl.full([MESSAGE], -1, gl.int32, SEQS))
    barrier()
    mbarrier.arrive(buffers.message_full.index(slot), count=1)
    # The last program to find the queue empty leaves it as it was for the next launch.
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)
