"""The producer warp of the Hopper forward kernel, and the shared memory through which it feeds the consumers.

Memory goes round in rings with two barriers a place: one says that it is full, the other that it is free again. The
producer also fetches the numbers of the work items and tells the consumers.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from longreach_kernels.backends.hopper.forward_products import ROWS
from longreach_kernels.backends.hopper.work_items import find_item, row_of, tile_of, transposed_row


@aggregate
class Buffers:
    """Shared memory, and the barriers that say when each part is full or free again. `q_operand` is the queries as
    products take them: a rounded copy where keys are 8-bit floats, else `q` itself."""

    q: gl.shared_memory_descriptor
    q_operand: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor
    item_full: gl.shared_memory_descriptor
    item_empty: gl.shared_memory_descriptor
    RING: gl.constexpr
    CONSUMERS: gl.constexpr
    OWN_OUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        q,
        q_operand,
        k,
        v,
        o,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        items,
        item_full,
        item_empty,
        RING,
        CONSUMERS,
        OWN_OUT,
    ):
        self.q = q
        self.q_operand = q_operand
        self.k = k
        self.v = v
        self.o = o
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.items = items
        self.item_full = item_full
        self.item_empty = item_empty
        self.RING = gl.constexpr(RING)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.OWN_OUT = gl.constexpr(OWN_OUT)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Barriers in shared memory, (count, 1) int64, each of which opens after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def _publish(index, turn, buffers):
    """Tell the consumers the number of the item in a turn."""
    slot = turn % 2
    mbarrier.wait(buffers.item_empty.index(slot), ((turn // 2) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffers.items.index(slot).store(gl.zeros([1], gl.int32, layout) + index)
    mbarrier.arrive(buffers.item_full.index(slot), count=1)


@gluon.jit
def next_item(turn, buffers):
    """What the producer published for a turn."""
    slot = turn % 2
    mbarrier.wait(buffers.item_full.index(slot), (turn // 2) & 1)
    index = gl.max(buffers.items.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(buffers.item_empty.index(slot), count=1)
    return index


@gluon.jit
def produce(q_desc, k_desc, v_desc, counter, batch, buffers):
    """The producer warp: for each item the queries once, then its key tiles."""
    RING: gl.constexpr = buffers.RING
    step = gl.to_tensor(0)  # of all items: rings go on from one to the next
    turn = gl.to_tensor(0)
    filled = gl.to_tensor(0)  # items that had something to do
    index = gl.program_id(0)
    while index < batch.num_items:
        _publish(index, turn, buffers)
        turn += 1
        item = find_item(batch, index)
        index = gl.num_programs(0) + gl.atomic_add(counter, 1)  # the next one, in time for it
        if item.num_steps > 0:
            tile = tile_of(batch, item, 0)
            row = row_of(batch, item, tile)
            for c in gl.static_range(buffers.CONSUMERS):
                mbarrier.wait(buffers.q_empty.index(c), (filled & 1) ^ 1)
                mbarrier.expect(buffers.q_full.index(c), q_desc.block_type.nbytes)
                coordinates = [item.q_outer, item.q_row + ROWS * c, 0]
                tma.async_copy_global_to_shared(q_desc, coordinates, buffers.q_full.index(c), buffers.q.index(c))
            filled += 1
            for j in range(item.num_steps):
                slot = step % RING
                phase = ((step // RING) & 1) ^ 1
                mbarrier.wait(buffers.k_empty.index(slot), phase)
                k_full = buffers.k_full.index(slot)
                mbarrier.expect(k_full, k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [item.kv_outer, row, 0], k_full, buffers.k.index(slot))
                # The next tile's place is looked up while this one waits for room.
                next_tile = tile_of(batch, item, gl.minimum(j + 1, item.num_steps - 1))
                next_row = row_of(batch, item, next_tile)
                v_row = row
                if v_desc.dtype == gl.float8e4nv:
                    v_row = transposed_row(batch, item, tile, v_desc.block_type.shape[1])
                mbarrier.wait(buffers.v_empty.index(slot), phase)
                v_full = buffers.v_full.index(slot)
                mbarrier.expect(v_full, v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(v_desc, [item.kv_outer, v_row, 0], v_full, buffers.v.index(slot))
                row = next_row
                tile = next_tile
                step += 1
    _publish(index, turn, buffers)
