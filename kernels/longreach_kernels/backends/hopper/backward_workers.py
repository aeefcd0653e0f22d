"""The worker warps of the Hopper backward kernel: one brings keys and queries, one takes the parts of dQ away.

dQ of a query tile is a sum over programs. Here each program's part is added in its turn, in ascending order of the key
tiles, so that the sum is the same bits every time.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

KEYS = gl.constexpr(64)  # of keys, a consumer warpgroup: the M of one wgmma
CONSUMERS = gl.constexpr(2)
# One consumer's half of a query tile's dQ, 64 x 64 numbers in a row, as the tensor memory accelerator moves it.
PART_ROWS = gl.constexpr(16)
PART_COLUMNS = gl.constexpr(256)


@builtin
def _reduce_add(desc, coord, source, _semantic: Any = None):
    """Add a tile of shared memory to global memory (`cp.reduce.async.bulk.tensor`, section 9.7.9.27 of the PTX ISA)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle)


@gluon.jit
def _read_counter(counter):
    """Its value; what was written before it was raised to this value is visible afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _follow_reads():
    """What the tensor memory accelerator does from here on comes after what this thread has read."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for_writes():
    """Until the warp's bulk writes are done, not only their reads of shared memory (as after `tma.store_wait`)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def produce(q_desc, k_desc, v_desc, grad_desc, stats_desc, inputs, places, key_tile, FORM: gl.constexpr):
    """The producer warp: keys and values once, then every query tile, downwards, of each head of the group."""
    BM: gl.constexpr = FORM.block_m
    RING: gl.constexpr = FORM.ring
    GROUP: gl.constexpr = FORM.group
    kv_bytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    step_bytes: gl.constexpr = q_desc.block_type.nbytes + grad_desc.block_type.nbytes + stats_desc.block_type.nbytes
    mbarrier.expect(inputs.kv_full, CONSUMERS * kv_bytes)
    for c in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(
            k_desc, [places.kv_row + KEYS * c, places.kv_col], inputs.kv_full, inputs.k.index(c)
        )
        tma.async_copy_global_to_shared(
            v_desc, [places.kv_row + KEYS * c, places.kv_col], inputs.kv_full, inputs.v.index(c)
        )
    for i in range(key_tile.num_tiles * GROUP):
        slot = i % RING
        member = i % GROUP
        tile = key_tile.first + key_tile.num_tiles - 1 - i // GROUP
        q_place = [places.q_row + member * places.q_head_row + tile * BM, places.q_col + member * places.q_head_col]
        g_place = [places.g_row + member * places.g_head_row + tile * BM, places.g_col + member * places.g_head_col]
        stats_row = 2 * (places.padded_tile + member * places.padded_head + tile)
        bar = inputs.full.index(slot)
        mbarrier.wait(inputs.empty.index(slot), ((i // RING) & 1) ^ 1)
        mbarrier.expect(bar, step_bytes)
        tma.async_copy_global_to_shared(q_desc, q_place, bar, inputs.q.index(slot))
        tma.async_copy_global_to_shared(stats_desc, [stats_row, 0], bar, inputs.stats.index(slot))
        tma.async_copy_global_to_shared(grad_desc, g_place, bar, inputs.grad.index(slot))


@gluon.jit
def accumulate(dq_desc, gradients, counters, places, key_tile, FORM: gl.constexpr):
    """The warp that adds each step's part of dQ to the sum, when those of all key tiles before this one are in it."""
    BM: gl.constexpr = FORM.block_m
    PARTS: gl.constexpr = FORM.parts
    GROUP: gl.constexpr = FORM.group
    for i in range(key_tile.num_tiles * GROUP):
        tile = key_tile.first + key_tile.num_tiles - 1 - i // GROUP
        place = places.padded_tile + i % GROUP * places.padded_head + tile
        before = key_tile.tile  # key tiles that see this query tile and come before ours
        if FORM.windowed:
            before -= gl.maximum(key_tile.offset + tile * BM - key_tile.window + 1, 0) // (CONSUMERS * KEYS)
        counter = counters + place
        part = i % PARTS
        while _read_counter(counter) < before:
            pass
        _follow_reads()
        mbarrier.wait(gradients.dq_full.index(part), (i // PARTS) & 1)
        for c in gl.static_range(CONSUMERS):
            row = (place * CONSUMERS + c) * PART_ROWS
            if before == 0:  # the buffer holds nothing yet
                tma.async_copy_shared_to_global(dq_desc, [row, 0], gradients.dq.index(part * CONSUMERS + c))
            else:
                _reduce_add(dq_desc, [row, 0], gradients.dq.index(part * CONSUMERS + c))
        tma.store_wait(0)
        mbarrier.arrive(gradients.dq_empty.index(part), count=1)
        _wait_for_writes()
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
