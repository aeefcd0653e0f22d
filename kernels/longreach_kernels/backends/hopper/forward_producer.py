"""The producer warp of the Hopper forward kernel, and the shared memory through which it feeds the consumers.

Memory goes round in rings with two barriers a place: one says that it is full, the other that it is free again. The
producer also fetches the numbers of the work items and tells the consumers.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from longreach_kernels.backends.hopper.forward_products import ROWS
from longreach_kernels.backends.hopper.work_items import find_item, row_of, tile_of, transposed_row


class Queries(NamedTuple):
    """The queries of each consumer, and its results: shared memory, and barriers that say when it is full or free.

    `operand` is the queries as products take them: a rounded copy where keys are 8-bit floats, else `q` itself. `out`
    is where results go: memory of its own, or `q`.
    """

    q: Any
    operand: Any
    out: Any
    full: Any
    empty: Any


class Tiles(NamedTuple):
    """The rings of K and V, and barriers that say when a place is full or free."""

    k: Any
    v: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Turns(NamedTuple):
    """The number of the item of each of the next two turns, and barriers that say when it is there or read."""

    numbers: Any
    full: Any
    empty: Any


class Buffers(NamedTuple):
    """The shared memory of a program."""

    queries: Any
    tiles: Any
    turns: Any


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Barriers in shared memory, (count, 1) int64, each of which opens after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def _publish(index, turn, turns):
    """Tell the consumers the number of the item in a turn."""
    slot = turn % 2
    mbarrier.wait(turns.empty.index(slot), ((turn // 2) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    turns.numbers.index(slot).store(gl.zeros([1], gl.int32, layout) + index)
    mbarrier.arrive(turns.full.index(slot), count=1)


@gluon.jit
def next_item(turn, turns):
    """What the producer published for a turn."""
    slot = turn % 2
    mbarrier.wait(turns.full.index(slot), (turn // 2) & 1)
    index = gl.max(turns.numbers.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(turns.empty.index(slot), count=1)
    return index


@gluon.jit
def produce(q_desc, k_desc, v_desc, counter, batch, buffers, FORM: gl.constexpr):
    """The producer warp: for each item the queries once, then its key tiles."""
    RING: gl.constexpr = FORM.ring
    CONSUMERS: gl.constexpr = FORM.consumers
    step = gl.to_tensor(0)  # of all items: rings go on from one to the next
    turn = gl.to_tensor(0)
    filled = gl.to_tensor(0)  # items that had something to do
    index = gl.program_id(0)
    while index < batch.sizes.num_items:
        _publish(index, turn, buffers.turns)
        turn += 1
        item = find_item(batch, index, FORM)
        index = gl.num_programs(0) + gl.atomic_add(counter, 1)  # the next one, in time for it
        if item.steps.count > 0:
            tile = tile_of(batch, item, 0, FORM)
            row = row_of(batch, item, tile, FORM)
            for c in gl.static_range(CONSUMERS):
                mbarrier.wait(buffers.queries.empty.index(c), (filled & 1) ^ 1)
                mbarrier.expect(buffers.queries.full.index(c), q_desc.block_type.nbytes)
                coordinates = [item.q_outer, item.q_row + ROWS * c, 0]
                tma.async_copy_global_to_shared(
                    q_desc, coordinates, buffers.queries.full.index(c), buffers.queries.q.index(c)
                )
            filled += 1
            for j in range(item.steps.count):
                slot = step % RING
                phase = ((step // RING) & 1) ^ 1
                mbarrier.wait(buffers.tiles.k_empty.index(slot), phase)
                k_full = buffers.tiles.k_full.index(slot)
                mbarrier.expect(k_full, k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [item.kv_outer, row, 0], k_full, buffers.tiles.k.index(slot))
                # The next tile's place is looked up while this one waits for room.
                next_tile = tile_of(batch, item, gl.minimum(j + 1, item.steps.count - 1), FORM)
                next_row = row_of(batch, item, next_tile, FORM)
                v_row = row
                if v_desc.dtype == gl.float8e4nv:
                    v_row = transposed_row(batch, item, tile, v_desc.block_type.shape[1])
                mbarrier.wait(buffers.tiles.v_empty.index(slot), phase)
                v_full = buffers.tiles.v_full.index(slot)
                mbarrier.expect(v_full, v_desc.block_type.nbytes)
                column = item.part * FORM.value_dim
                tma.async_copy_global_to_shared(
                    v_desc, [item.kv_outer, v_row, column], v_full, buffers.tiles.v.index(slot)
                )
                row = next_row
                tile = next_tile
                step += 1
    _publish(index, turn, buffers.turns)
