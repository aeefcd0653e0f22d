"""Paged decode for Hopper (sm_90), in Gluon: persistent programs, fed by the tensor memory accelerator (TMA).

Flash-Decoding (Dao et al. 2023): a sequence's keys are cut into splits whose size depends on its own length alone and
which lie at absolute positions, so its result has the same bits in any batch. A program takes splits from a queue until
none is left: one warp of it, the producer (`decode_queue`), streams keys and values through a ring in shared memory
without a pause between splits, and the other warps, the consumers, compute. The program that finishes the last split of
a (sequence, KV head) merges all of them, in ascending order and in fp32.

The queries of one KV head's group are the 16 rows of a product on the tensor cores. Each consumer warp computes its own
keys of a tile, with a softmax of its own: it waits for the others only where a tile's memory is handed back, and the
warps' results are merged once a split.

Pages of 8-bit floats are converted to fp16 in registers. There the tensor cores want two keys' numbers of one channel
side by side, where pages hold two channels' numbers of one key: a thread reads 16 channels of each of its keys, and
its instructions that pair the bytes do the transpose (`_values`).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .decode_layouts import paired_layout, replicated, shared_view
from .decode_merge import merge
from .decode_queue import MESSAGE, MESSAGES, barrier, produce

ROWS = gl.constexpr(16)  # of queries in a product


@gluon.jit
def _field(message, i: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, MESSAGE, LAYOUT) == i, message, 0), 0)


@gluon.jit
def _scores(q_operand, tile, S: gl.constexpr):
    """Q K^T of a key tile (slices, D, keys), in the layout S."""
    SLICES: gl.constexpr = tile.shape[0]
    KEYS: gl.constexpr = tile.shape[2]
    K_OPERAND: gl.constexpr = gl.DotOperandLayout(1, S, q_operand.type.layout.k_width)
    return mma_v2(q_operand, tile.load(K_OPERAND).to(q_operand.dtype), gl.zeros([SLICES, ROWS, KEYS], gl.float32, S))


@gluon.jit
def _logits(qk, scale_log2, softcap_log2, SOFTCAP: gl.constexpr):
    """Logits in log2 units; of a softcap see `portable.primitives.logits_log2`."""
    if SOFTCAP:
        logits = softcap_log2 * (1.0 - 2.0 / (gl.exp2(qk * scale_log2) + 1.0))
    else:
        logits = qk * scale_log2
    return logits


@gluon.jit
def _softmax(logits, row_max, row_sum):
    """One step of the online softmax, of each slice: p, the factor of what was summed before, maximum and sum."""
    new_max = gl.maximum(row_max, gl.max(logits, 2))
    safe = gl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet: no inf - inf
    p = gl.exp2(logits - safe[:, :, None])
    alpha = gl.exp2(row_max - safe)
    return p, alpha, new_max, row_sum * alpha + gl.sum(p, 2)


@gluon.jit
def _values(tile, V_OPERAND: gl.constexpr, D_WARPS: gl.constexpr):
    """The value tile (slices, keys, D) as operand of P V. Of 8-bit values the channels come in another order, which
    `_store_sum` undoes."""
    SLICES: gl.constexpr = tile.shape[0]
    KEYS: gl.constexpr = tile.shape[1]
    D: gl.constexpr = tile.shape[2]
    if tile.dtype == gl.float8e4nv:
        v = tile.load(paired_layout(D, KEYS, SLICES, D_WARPS))
        v = v.reshape([SLICES, KEYS, 8, D_WARPS, D // 8 // D_WARPS]).permute([0, 1, 4, 3, 2])
        v = gl.convert_layout(v.reshape([SLICES, KEYS, D]), V_OPERAND).to(gl.float16)
    else:
        v = tile.load(V_OPERAND)
    return v


@gluon.jit
def _store_sum(x, pointer, first, GROUP: gl.constexpr, D: gl.constexpr, D_WARPS: gl.constexpr, PERMUTED: gl.constexpr):
    """Store the sum of x (slices, rows, columns) over the slices to (GROUP, D), where its columns begin at `first`. In
    pieces: the sum is exchanged through shared memory, which belongs to the ring."""
    SLICES: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    C: gl.constexpr = x.shape[2]
    if SLICES * R * C > 2048:
        low, high = x.reshape([SLICES, R, 2, C // 2]).permute([0, 1, 3, 2]).split()
        _store_sum(low, pointer, first, GROUP, D, D_WARPS, PERMUTED)
        _store_sum(high, pointer, first + C // 2, GROUP, D, D_WARPS, PERMUTED)
    else:
        total = gl.sum(x, 0)
        LAYOUT: gl.constexpr = total.type.layout
        rows = gl.arange(0, R, gl.SliceLayout(1, LAYOUT))
        columns = first + gl.arange(0, C, gl.SliceLayout(0, LAYOUT))
        if PERMUTED:
            columns = columns % 8 * (D // 8) + columns // 8 % D_WARPS * (D // 8 // D_WARPS) + columns // (8 * D_WARPS)
        mask = (rows < GROUP)[:, None] & (columns >= 0)[None, :]
        gl.store(pointer + rows[:, None] * D + columns[None, :], total, mask=mask)


@gluon.jit
def _hand_back(memory):
    """Tell the producer that memory is free. The fence makes this warp's loads complete first: without it they may
    still be on their way when all warps have passed the barrier, and TMA writes overtook them."""
    fence_async_shared()
    barrier()
    mbarrier.arrive(memory, count=1)


@gluon.jit
def _consume(
    part_out,
    part_lse,
    out,
    lse,
    sink_logits,
    arrivals,
    stride_ot,
    stride_oh,
    stride_lt,
    stride_lh,
    q_s,
    k_s,
    v_s,
    message_s,
    full,
    empty,
    message_full,
    message_empty,
    sinks,
    num_splits,
    scale_log2,
    softcap_log2,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_BLOCK: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    BOX: gl.constexpr,
    RING: gl.constexpr,
    WARPS: gl.constexpr,
    MERGE_BLOCK: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINK_LOGITS: gl.constexpr,
):
    """The consumer warps: each item's product with its keys, and the merge of those whose last split it was."""
    FP8: gl.constexpr = k_s.dtype == gl.float8e4nv
    BITS: gl.constexpr = k_s.dtype.primitive_bitwidth
    COMPUTE: gl.constexpr = gl.float16 if FP8 else k_s.dtype
    # A slice of a tile's keys belongs to one warp, or at large head dims to two, which halve the channels of P V.
    D_WARPS: gl.constexpr = max(1, D // 128)
    SLICES: gl.constexpr = WARPS // D_WARPS
    KEYS: gl.constexpr = BN // SLICES
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, 1, D_WARPS], [1, 16, 8])
    Q_OPERAND: gl.constexpr = gl.DotOperandLayout(0, S, 4 if FP8 else 2)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    V_OPERAND: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    MESSAGE_LAYOUT: gl.constexpr = replicated(MESSAGE, WARPS)
    K_VIEW: gl.constexpr = shared_view(BITS, D, BN, BOX, SLICES, True)
    V_VIEW: gl.constexpr = shared_view(BITS, D, BN, BOX, SLICES, False)

    part_of_tile = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, S)))[:, None][:, :, None]
    key = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, S)))[None, :]
    key_offsets = part_of_tile * KEYS + gl.expand_dims(key, 1)
    v_part = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, V_OPERAND)))[:, None][:, :, None]
    v_key = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, V_OPERAND)))[None, :][:, :, None]
    v_offsets = v_part * KEYS + v_key
    q_rows = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, Q_OPERAND)))[None, :][:, :, None]

    items = 0
    tiles = 0
    seq = 0
    while seq >= 0:
        slot = items % MESSAGES
        mbarrier.wait(message_full.index(slot), (items // MESSAGES) & 1)
        message = message_s.index(slot).load(MESSAGE_LAYOUT)
        seq = _field(message, 0, MESSAGE_LAYOUT)
        row = _field(message, 1, MESSAGE_LAYOUT)
        kv_head = _field(message, 2, MESSAGE_LAYOUT)
        part = _field(message, 3, MESSAGE_LAYOUT)
        first_tile = _field(message, 4, MESSAGE_LAYOUT)
        num_tiles = _field(message, 5, MESSAGE_LAYOUT)
        num_keys = _field(message, 6, MESSAGE_LAYOUT)
        count = _field(message, 7, MESSAGE_LAYOUT)
        low = _field(message, 8, MESSAGE_LAYOUT)
        v_factor = _field(message, 10, MESSAGE_LAYOUT).to(gl.float32, bitcast=True)
        q_tile = q_s.index(slot).load(Q_OPERAND)
        _hand_back(message_empty.index(slot))
        items += 1
        if seq >= 0:
            scale = scale_log2
            if FP8:
                # Queries may exceed the range of fp16; a power of two brings them into it and loses nothing.
                wide = gl.where(q_rows < GROUP, q_tile.to(gl.float32), 0.0)
                largest = gl.max(gl.max(gl.max(gl.abs(wide), 2), 1), 0).to(gl.int32, bitcast=True) & 0x7F800000
                largest = gl.minimum(gl.maximum(largest, 1 << 23), 253 << 23)
                scaled = (wide * ((254 << 23) - largest).to(gl.float32, bitcast=True)).to(COMPUTE)
                k_factor = _field(message, 9, MESSAGE_LAYOUT).to(gl.float32, bitcast=True)
                scale = scale_log2 * largest.to(gl.float32, bitcast=True) * k_factor
            else:
                scaled = q_tile
            q_operand, _ = gl.broadcast(scaled, gl.zeros([SLICES, ROWS, D], COMPUTE, Q_OPERAND))
            row_max = gl.full([SLICES, ROWS], float("-inf"), gl.float32, gl.SliceLayout(2, S))
            row_sum = gl.full([SLICES, ROWS], 0.0, gl.float32, gl.SliceLayout(2, S))
            acc = gl.zeros([SLICES, ROWS, D], gl.float32, S)
            mbarrier.wait(full.index(tiles % RING), (tiles // RING) & 1)
            qk = _scores(q_operand, k_s.index(tiles % RING)._reinterpret(k_s.dtype, [SLICES, D, KEYS], K_VIEW), S)
            for i in range(num_tiles - 1):
                # The next tile's product runs beside this one's softmax.
                stage = (tiles + i) % RING
                following = (tiles + i + 1) % RING
                mbarrier.wait(full.index(following), ((tiles + i + 1) // RING) & 1)
                k_tile = k_s.index(following)._reinterpret(k_s.dtype, [SLICES, D, KEYS], K_VIEW)
                v_tile = v_s.index(stage)._reinterpret(v_s.dtype, [SLICES, KEYS, D], V_VIEW)
                next_qk = _scores(q_operand, k_tile, S)
                v = _values(v_tile, V_OPERAND, D_WARPS)
                _hand_back(empty.index(stage))
                logits = _logits(qk, scale, softcap_log2, SOFTCAP)
                tile_start = (first_tile + i) * BN
                if WINDOWED:  # noqa: SIM102 - the outer condition is known to the compiler, the inner one is not
                    if tile_start < low:
                        keys = tile_start + key_offsets
                        logits = gl.where((keys >= low) | (keys < sinks), logits, float("-inf"))
                p, alpha, row_max, row_sum = _softmax(logits, row_max, row_sum)
                acc = mma_v2(gl.convert_layout(p.to(COMPUTE), P_OPERAND), v, acc * alpha[:, :, None])
                qk = next_qk
            tiles += num_tiles
            stage = (tiles - 1) % RING
            v_tile = v_s.index(stage)._reinterpret(v_s.dtype, [SLICES, KEYS, D], V_VIEW)
            v = _values(v_tile, V_OPERAND, D_WARPS)
            _hand_back(empty.index(stage))
            keys = (first_tile + num_tiles - 1) * BN + key_offsets
            allowed = keys < num_keys
            if WINDOWED:
                allowed = allowed & ((keys >= low) | (keys < sinks))
            logits = gl.where(allowed, _logits(qk, scale, softcap_log2, SOFTCAP), float("-inf"))
            p, alpha, row_max, row_sum = _softmax(logits, row_max, row_sum)
            # Rows beyond the end may hold anything, and 0 times NaN is NaN.
            v = gl.where((first_tile + num_tiles - 1) * BN + v_offsets < num_keys, v, 0.0)
            acc = mma_v2(gl.convert_layout(p.to(COMPUTE), P_OPERAND), v, acc * alpha[:, :, None])

            largest_max = gl.max(row_max, 0)
            safe = gl.where(largest_max == float("-inf"), 0.0, largest_max)
            weights = gl.exp2(row_max - safe[None, :])
            total = gl.sum(row_sum * weights, 0)
            seen = total > 0.0
            safe_total = gl.where(seen, total, 1.0)
            part_weights = weights / safe_total[None, :]
            if FP8:
                part_weights = part_weights * v_factor
            x = acc * part_weights[:, :, None]
            if GROUP <= 8:  # half of the rows are of no use
                x, _ = x.reshape([SLICES, 2, 8, D]).permute([0, 2, 3, 1]).split()
            base = (seq * KV_HEADS + kv_head).to(gl.int64) * num_splits
            _store_sum(x, part_out + (base + part) * (GROUP * D), 0, GROUP, D, D_WARPS, FP8)
            LSE: gl.constexpr = total.type.layout
            heads = gl.arange(0, ROWS, LSE)
            part_result = gl.where(seen, largest_max + gl.log2(safe_total), float("-inf"))
            gl.store(part_lse + (base + part) * GROUP + heads, part_result, mask=heads < GROUP)

            barrier()  # all of this program's stores come before its arrival
            arrival = arrivals + seq * KV_HEADS + kv_head
            if gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == count - 1:
                gl.store(arrival, 0)
                merge(
                    part_out,
                    part_lse,
                    out,
                    lse,
                    sink_logits,
                    base,
                    count,
                    row,
                    kv_head,
                    stride_ot,
                    stride_oh,
                    stride_lt,
                    stride_lh,
                    GROUP,
                    D,
                    WARPS,
                    GROUP_BLOCK,
                    MERGE_BLOCK,
                    SINK_LOGITS,
                )


@gluon.jit(do_not_specialize=["num_seqs", "window", "sinks", "num_splits", "stride_table"])
def decode_kernel(
    q_desc,
    k_desc,
    v_desc,
    part_out,
    part_lse,
    out,
    lse,
    k_scale,
    v_scale,
    sink_logits,
    cu_q,
    context_lens,
    table,
    counters,
    stride_table,
    stride_ot,
    stride_oh,
    stride_lt,
    stride_lh,
    num_seqs,
    window,
    sinks,
    num_splits,
    scale_log2,
    softcap_log2,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_BLOCK: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    BOX: gl.constexpr,
    RING: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    MAX_SEQS: gl.constexpr,
    MERGE_BLOCK: gl.constexpr,
    MIN_BITS: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINK_LOGITS: gl.constexpr,
):
    """Any number of programs. Partial results (num_seqs, Hkv, num_splits, GROUP, D), normalised, and their lse in log2
    units. `counters`, all 0 before and after: the queue's next item, programs that are done, and for each (sequence, KV
    head) the splits that are done."""
    WARPS: gl.constexpr = gl.num_warps()
    k_s = gl.allocate_shared_memory(k_desc.dtype, [RING, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(k_desc.dtype, [RING, BN, D], k_desc.layout)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [MESSAGES, 1, ROWS, D], q_desc.layout)
    message_s = gl.allocate_shared_memory(gl.int32, [MESSAGES, MESSAGE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    message_full = gl.allocate_shared_memory(gl.int64, [MESSAGES, 1], mbarrier.MBarrierLayout())
    message_empty = gl.allocate_shared_memory(gl.int64, [MESSAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(MESSAGES):
        mbarrier.init(message_full.index(i), count=1)
        mbarrier.init(message_empty.index(i), count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize([
        (_consume, (
            part_out, part_lse, out, lse, sink_logits, counters + 2, stride_ot, stride_oh, stride_lt,
            stride_lh, q_s, k_s, v_s, message_s, full, empty, message_full, message_empty, sinks, num_splits,
            scale_log2, softcap_log2, KV_HEADS, GROUP, GROUP_BLOCK, D, BN, BOX, RING, WARPS, MERGE_BLOCK, WINDOWED,
            SOFTCAP, SINK_LOGITS)),
        (produce, (
            q_desc, k_desc, v_desc, cu_q, context_lens, table, stride_table, k_scale, v_scale, counters, q_s, k_s, v_s,
            message_s, full, empty, message_full, message_empty, num_seqs, window, sinks, KV_HEADS, GROUP, D, BN, BOX,
            RING, PAGE_SIZE, MAX_SEQS, WINDOWED, MIN_BITS, MAX_SPLITS)),
    ], [1], [PRODUCER_REGISTERS])
    # fmt: on
