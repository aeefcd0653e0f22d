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
def produce(
    q_desc,
    k_desc,
    v_desc,
    grad_desc,
    stats_desc,
    q_s,
    k_s,
    v_s,
    grad_s,
    stats_s,
    kv_full,
    full,
    empty,
    q_row,
    q_col,
    q_head_row,
    q_head_col,
    g_row,
    g_col,
    g_head_row,
    g_head_col,
    kv_row,
    kv_col,
    padded_tile,
    padded_head,
    first,
    num_tiles,
    BM: gl.constexpr,
    RING: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The producer warp: keys and values once, then every query tile, downwards, of each head of the group."""
    kv_bytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    step_bytes: gl.constexpr = q_desc.block_type.nbytes + grad_desc.block_type.nbytes + stats_desc.block_type.nbytes
    mbarrier.expect(kv_full, CONSUMERS * kv_bytes)
    for c in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(k_desc, [kv_row + KEYS * c, kv_col], kv_full, k_s.index(c))
        tma.async_copy_global_to_shared(v_desc, [kv_row + KEYS * c, kv_col], kv_full, v_s.index(c))
    for i in range(num_tiles * GROUP):
        slot = i % RING
        member = i % GROUP
        tile = first + num_tiles - 1 - i // GROUP
        q_place = [q_row + member * q_head_row + tile * BM, q_col + member * q_head_col]
        g_place = [g_row + member * g_head_row + tile * BM, g_col + member * g_head_col]
        stats_row = 2 * (padded_tile + member * padded_head + tile)
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), ((i // RING) & 1) ^ 1)
        mbarrier.expect(bar, step_bytes)
        tma.async_copy_global_to_shared(q_desc, q_place, bar, q_s.index(slot))
        tma.async_copy_global_to_shared(stats_desc, [stats_row, 0], bar, stats_s.index(slot))
        tma.async_copy_global_to_shared(grad_desc, g_place, bar, grad_s.index(slot))


@gluon.jit
def accumulate(
    dq_desc,
    dq_s,
    dq_full,
    dq_empty,
    counters,
    padded_tile,
    padded_head,
    first,
    num_tiles,
    tile_n,
    offset,
    window,
    BM: gl.constexpr,
    BN: gl.constexpr,
    PARTS: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """The warp that adds each step's part of dQ to the sum, when those of all key tiles before this one are in it."""
    for i in range(num_tiles * GROUP):
        tile = first + num_tiles - 1 - i // GROUP
        place = padded_tile + i % GROUP * padded_head + tile
        before = tile_n  # key tiles that see this query tile and come before ours
        if WINDOWED:
            before -= gl.maximum(offset + tile * BM - window + 1, 0) // BN
        counter = counters + place
        part = i % PARTS
        while _read_counter(counter) < before:
            pass
        _follow_reads()
        mbarrier.wait(dq_full.index(part), (i // PARTS) & 1)
        for c in gl.static_range(CONSUMERS):
            row = (place * CONSUMERS + c) * PART_ROWS
            if before == 0:  # the buffer holds nothing yet
                tma.async_copy_shared_to_global(dq_desc, [row, 0], dq_s.index(part * CONSUMERS + c))
            else:
                _reduce_add(dq_desc, [row, 0], dq_s.index(part * CONSUMERS + c))
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(part), count=1)
        _wait_for_writes()
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
