"""The backward kernel for Hopper (sm_90), in Gluon: one pass of five products, deterministic.

FlashAttention-2 (Dao 2023, algorithm 2), warp-specialised as in FlashAttention-3 (Shah et al. 2024): a program owns a
tile of 128 keys, 64 for each of two consumer warpgroups, and walks the query tiles that see them. Scores stand
transposed, keys down and queries across, so that P^T and dS^T feed dV = P^T dO and dK = dS^T Q from registers; only
dS goes through shared memory, for dQ = dS K.

A query tile's dQ is a sum over key tiles, and so over programs. A partition of its own adds each program's part to an
fp32 buffer with the tensor memory accelerator, in ascending order of the key tiles: a counter for each query tile says
how many have been added. Programs walk their query tiles downwards, in each the query heads of their group, and are
numbered in the order in which they start, so a program waits for such only as started before it, and seldom, because
they are ahead of it on the same path.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from longreach_kernels.backends.hopper.backward_arguments import Gradients, Inputs, KeyTile, Places
from longreach_kernels.backends.hopper.backward_consumer import consume
from longreach_kernels.backends.hopper.backward_workers import (
    CONSUMERS,
    KEYS,
    PART_COLUMNS,
    PART_ROWS,
    accumulate,
    produce,
)
from longreach_kernels.backends.hopper.work_items import find_sequence


@gluon.jit
def _store(tile_s, desc, pointer, row, col, stride, num_rows, D: gl.constexpr):
    """Write the first num_rows rows of a tile of shared memory (64, D)."""
    if num_rows >= KEYS:
        tma.async_copy_shared_to_global(desc, [row, col], tile_s)
    else:  # the box would write over the next sequence
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        rows = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
        cols = gl.arange(0, D, gl.SliceLayout(0, layout))
        places = (row + rows).to(gl.int64)[:, None] * stride + (col + cols)[None, :]
        gl.store(pointer + places, tile_s.load(layout), mask=(rows < num_rows)[:, None])


@gluon.jit(
    do_not_specialize=[
        "num_seqs",
        "dense_queries",
        "dense_keys",
        "window",
        "num_heads",
        "num_slots",
        "section_heads",
        "padded_head",
    ]
)
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    grad_desc,
    stats_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    dk_ptr,
    dv_ptr,
    counters,
    cu_q,
    cu_k,
    q_head_row,
    q_head_col,
    g_head_row,
    g_head_col,
    kv_head_row,
    kv_head_col,
    dkv_head_row,
    dkv_head_col,
    stride_dkv,
    padded_head,
    num_seqs,
    num_heads,
    num_slots,
    section_heads,
    dense_queries,
    dense_keys,
    window,
    scale,
    scale_log2,
    FORM: gl.constexpr,
):
    """One program for each key tile of each KV head. `counters[0]` numbers programs in the order in which they start;
    the others belong to the query tiles of the padded buffers, `padded_head` tiles for each query head.

    Programs go through section_heads heads at a time, so that what they read together stays in the L2 cache. Dense
    batches count the heads of all sequences, `num_heads` of them."""
    BN: gl.constexpr = CONSUMERS * KEYS
    BM: gl.constexpr = FORM.block_m
    D: gl.constexpr = FORM.head_dim
    RING: gl.constexpr = FORM.ring
    PARTS: gl.constexpr = FORM.parts
    ticket = gl.atomic_add(counters, 1, sem="relaxed")
    section = ticket // (num_slots * section_heads)
    size = gl.minimum(num_heads - section * section_heads, section_heads)
    within = ticket - section * (num_slots * section_heads)
    kv_head = section * section_heads + within % size
    slot = within // size
    if FORM.ragged:
        seq, first_slot = find_sequence(cu_k, num_seqs, slot, BN)
        tile_n = slot - first_slot
        q_start = gl.load(cu_q + seq)
        k_start = gl.load(cu_k + seq)
        num_queries = gl.load(cu_q + seq + 1) - q_start
        num_keys = gl.load(cu_k + seq + 1) - k_start
        tile_0 = (q_start - gl.load(cu_q)) // BM + seq
    else:
        tile_n = slot
        q_start = 0
        k_start = 0
        num_queries = dense_queries
        num_keys = dense_keys
        tile_0 = 0
    if tile_n * BN < num_keys:
        q_s = gl.allocate_shared_memory(q_desc.dtype, [RING, BM, D], q_desc.layout)
        grad_s = gl.allocate_shared_memory(q_desc.dtype, [RING, BM, D], grad_desc.layout)
        k_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, KEYS, D], k_desc.layout)
        v_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, KEYS, D], v_desc.layout)
        stats_s = gl.allocate_shared_memory(gl.float32, [RING, 2, BM], stats_desc.layout)
        iota_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        iota_s = gl.allocate_shared_memory(
            gl.int32, [BM], gl.SwizzledSharedLayout(1, 1, 1, [0]), gl.arange(0, BM, iota_layout)
        )
        ds_s = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, KEYS, BM], q_desc.layout)
        dq_s = gl.allocate_shared_memory(gl.float32, [PARTS * CONSUMERS, PART_ROWS, PART_COLUMNS], dq_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        dq_full = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
        dq_empty = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
        mbarrier.init(kv_full, count=1)
        for i in gl.static_range(RING):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
        for i in gl.static_range(PARTS):
            mbarrier.init(dq_full.index(i), count=CONSUMERS)
            mbarrier.init(dq_empty.index(i), count=1)
        fence_async_shared()

        # Query tiles `first <= tile < stop` see keys of this tile, those `inner <= tile < inner_end` see all of them.
        offset = num_keys - num_queries
        first_key = tile_n * BN
        last_key = gl.minimum(first_key + BN, num_keys) - 1
        first = 0
        inner = 0
        stop = gl.cdiv(num_queries, BM)
        inner_end = stop
        if FORM.causal:
            first = gl.maximum(first_key - offset, 0) // BM
            inner = gl.cdiv(gl.maximum(last_key - offset, 0), BM)
        if FORM.windowed:
            stop = gl.cdiv(gl.minimum(gl.maximum(last_key + window - offset, 0), num_queries), BM)
            inner_end = gl.maximum(first_key + window - offset, 0) // BM
        if first_key + BN > num_keys:  # the tile's last rows are no keys
            inner_end = 0
        num_tiles = gl.maximum(stop - first, 0)

        head = kv_head * FORM.group
        padded_tile = head * padded_head + tile_0
        q_row = q_start + head * q_head_row
        q_col = head * q_head_col
        g_row = q_start + head * g_head_row
        g_col = head * g_head_col
        kv_row = k_start + kv_head * kv_head_row + first_key
        kv_col = kv_head * kv_head_col
        dkv_row = k_start + kv_head * dkv_head_row + first_key
        dkv_col = kv_head * dkv_head_col
        tile_counters = counters + 1
        inputs = Inputs(q_s, k_s, v_s, grad_s, stats_s, kv_full, full, empty)
        gradients = Gradients(iota_s, ds_s, dq_s, dq_full, dq_empty)
        key_tile = KeyTile(tile_n, first, inner, inner_end, num_tiles, num_keys, offset, window)
        # fmt: off
        places = Places(
            q_row, q_col, q_head_row, q_head_col, g_row, g_col, g_head_row, g_head_col, kv_row, kv_col,
            padded_tile, padded_head)
        gl.warp_specialize([
            (consume, (0, inputs, gradients, key_tile, scale, scale_log2, FORM)),
            (consume, (1, inputs, gradients, key_tile, scale, scale_log2, FORM)),
            (produce, (q_desc, k_desc, v_desc, grad_desc, stats_desc, inputs, places, key_tile, FORM)),
            (accumulate, (dq_desc, gradients, tile_counters, places, key_tile, FORM)),
        ], [4, 1, 1], [FORM.registers, FORM.worker_registers, FORM.worker_registers])
        # fmt: on
        fence_async_shared()
        for c in gl.static_range(CONSUMERS):
            row = dkv_row + c * KEYS
            num_rows = num_keys - first_key - c * KEYS
            _store(v_s.index(c), dv_desc, dv_ptr, row, dkv_col, stride_dkv, num_rows, D)
            _store(k_s.index(c), dk_desc, dk_ptr, row, dkv_col, stride_dkv, num_rows, D)
        tma.store_wait(0)
