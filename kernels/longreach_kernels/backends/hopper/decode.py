"""Paged decode for Hopper (sm_90), in Gluon: persistent programs, fed by the tensor memory accelerator (TMA).

Flash-Decoding (Dao et al. 2023): a sequence's keys are cut into splits whose size depends on its own length alone and
which lie at absolute positions, so its result has the same bits in any batch. A program takes splits from a queue until
none is left: one warp of it, the producer (`decode_queue`), streams keys and values through a ring in shared memory
without a pause between splits, and the other warps, the consumers, compute. The program that finishes the last split of
a (sequence, KV head) merges all of them, in ascending order and in fp32.

The queries of one KV head's group are the 16 rows of a product on the tensor cores. Each consumer warp computes its own
keys of a tile, with a softmax of its own: it waits for the others only where a tile's memory is handed back, and the
warps' results are merged once a split.

Pages of 8-bit floats are converted to fp16 in registers (`decode_products`).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from longreach_kernels.backends.hopper.decode_arguments import Buffers, Output, Pages, Scales, Sizes
from longreach_kernels.backends.hopper.decode_layouts import replicated, shared_view
from longreach_kernels.backends.hopper.decode_merge import merge
from longreach_kernels.backends.hopper.decode_products import ROWS, scores, values
from longreach_kernels.backends.hopper.decode_queue import MESSAGE, barrier, produce
from longreach_kernels.backends.hopper.softmax import rescale

_FOLLOW: gl.constexpr = gl.constexpr("griddepcontrol.wait; mov.u32 $0, 0;")


@gluon.jit
def _field(message, i: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, MESSAGE, LAYOUT) == i, message, 0), 0)


@gluon.jit
def _logits(qk, scale_log2, softcap_log2, SOFTCAP: gl.constexpr):
    """Logits in log2 units; of a softcap see `triton.primitives.logits_log2`."""
    if SOFTCAP:
        logits = softcap_log2 * (1.0 - 2.0 / (gl.exp2(qk * scale_log2) + 1.0))
    else:
        logits = qk * scale_log2
    return logits


@gluon.jit
def _row_sums(p):
    """Sums of p (slices, rows, keys) over the keys that one thread holds: (slices, rows, 4)."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], ROWS, p.shape[2] // 8, 4, 2]), 4), 2)


@gluon.jit
def _softmax(logits, row_max, row_sum):
    """One step of the online softmax, of each slice: p, the factor of what was summed before, maximum and sum.

    As `softmax.softmax_step`: a maximum stays while it would grow by no more than 8, and of sums (slices, rows, 4) each
    thread keeps its own.
    """
    tile_max = gl.max(logits, 2)
    new_max = gl.where(tile_max - row_max > 8.0, tile_max, row_max)
    safe = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(logits - safe[:, :, None])
    alpha = gl.exp2(row_max - safe)
    factors = gl.convert_layout(alpha, gl.SliceLayout(2, row_sum.type.layout), assert_trivial=True)
    return p, alpha, new_max, row_sum * factors[:, :, None] + _row_sums(p)


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
def _consume(output, arrivals, sizes, scales, buffers, WARPS: gl.constexpr, FORM: gl.constexpr):
    """The consumer warps: each item's product with its keys, and the merge of those whose last split it was."""
    D: gl.constexpr = FORM.head_dim
    GROUP: gl.constexpr = FORM.group
    BN: gl.constexpr = FORM.block_n
    BOX: gl.constexpr = FORM.box
    RING: gl.constexpr = FORM.ring
    MESSAGES: gl.constexpr = FORM.messages
    k_s = buffers.k
    v_s = buffers.v
    full = buffers.full
    empty = buffers.empty
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

    slice_of_tile = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, S)))[:, None][:, :, None]
    key = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, S)))[None, :]
    key_offsets = slice_of_tile * KEYS + gl.expand_dims(key, 1)
    q_rows = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, Q_OPERAND)))[None, :][:, :, None]

    items = 0
    tiles = 0
    seq = 0
    while seq >= 0:
        slot = items % MESSAGES
        mbarrier.wait(buffers.message_full.index(slot), (items // MESSAGES) & 1)
        message = buffers.messages.index(slot).load(MESSAGE_LAYOUT)
        seq = _field(message, 0, MESSAGE_LAYOUT)
        row = _field(message, 1, MESSAGE_LAYOUT)
        kv_head = _field(message, 2, MESSAGE_LAYOUT)
        split = _field(message, 3, MESSAGE_LAYOUT)
        first_tile = _field(message, 4, MESSAGE_LAYOUT)
        num_tiles = _field(message, 5, MESSAGE_LAYOUT)
        num_keys = _field(message, 6, MESSAGE_LAYOUT)
        count = _field(message, 7, MESSAGE_LAYOUT)
        low = _field(message, 8, MESSAGE_LAYOUT)
        v_factor = _field(message, 10, MESSAGE_LAYOUT).to(gl.float32, bitcast=True)
        q_tile = buffers.q.index(slot).load(Q_OPERAND)
        items += 1
        if seq >= 0:
            scale = scales.scale_log2
            if FP8:
                # Queries may exceed the range of fp16; a power of two brings them into it and loses nothing.
                # What it makes of the rows behind the group, other heads', is not stored.
                wide = q_tile.to(gl.float32)
                own = gl.where(q_rows < GROUP, gl.abs(wide), 0.0)
                largest = gl.max(gl.max(gl.max(own, 2), 1), 0).to(gl.int32, bitcast=True) & 0x7F800000
                largest = gl.minimum(gl.maximum(largest, 1 << 23), 253 << 23)
                scaled = (wide * ((254 << 23) - largest).to(gl.float32, bitcast=True)).to(COMPUTE)
                k_factor = _field(message, 9, MESSAGE_LAYOUT).to(gl.float32, bitcast=True)
                scale = scales.scale_log2 * largest.to(gl.float32, bitcast=True) * k_factor
            else:
                scaled = q_tile
            q_operand, _ = gl.broadcast(scaled, gl.zeros([SLICES, ROWS, D], COMPUTE, Q_OPERAND))
            row_max = gl.full([SLICES, ROWS], float("-inf"), gl.float32, gl.SliceLayout(2, S))
            row_sum = _row_sums(gl.zeros([SLICES, ROWS, KEYS], gl.float32, S))
            acc = gl.zeros([SLICES, ROWS, D], gl.float32, S)
            mbarrier.wait(full.index(tiles % RING), (tiles // RING) & 1)
            qk = scores(q_operand, k_s.index(tiles % RING)._reinterpret(k_s.dtype, [SLICES, D, KEYS], K_VIEW), S)
            for i in range(num_tiles - 1):
                # The next tile's product runs beside this one's softmax.
                stage = (tiles + i) % RING
                following = (tiles + i + 1) % RING
                # Only now is the tile before handed back: its products have been issued, so its loads have come. Loads
                # that nothing has waited for may still be on their way behind a barrier, and behind a fence, and would
                # be overtaken by the TMA writes of the next tile.
                # docs/dev/kernel-log.md#decode-stages-handed-back-too-early
                barrier()
                mbarrier.arrive(empty.index((tiles + i + RING - 1) % RING), count=1, pred=i > 0)
                mbarrier.wait(full.index(following), ((tiles + i + 1) // RING) & 1)
                k_tile = k_s.index(following)._reinterpret(k_s.dtype, [SLICES, D, KEYS], K_VIEW)
                next_qk = scores(q_operand, k_tile, S)
                v = values(stage, v_s, 0, BN, BOX, V_OPERAND, D_WARPS, False)
                logits = _logits(qk, scale, scales.softcap_log2, FORM.softcap)
                tile_start = (first_tile + i) * BN
                if FORM.windowed:  # noqa: SIM102 - the outer condition is known to the compiler, the inner one is not
                    if tile_start < low:
                        keys = tile_start + key_offsets
                        logits = gl.where((keys >= low) | (keys < sizes.sinks), logits, float("-inf"))
                p, alpha, row_max, row_sum = _softmax(logits, row_max, row_sum)
                acc = mma_v2(gl.convert_layout(p.to(COMPUTE), P_OPERAND), v, rescale(acc, alpha[:, :, None], WARPS))
                qk = next_qk
            tiles += num_tiles
            barrier()
            mbarrier.arrive(empty.index((tiles + RING - 2) % RING), count=1, pred=num_tiles > 1)
            keys = (first_tile + num_tiles - 1) * BN + key_offsets
            allowed = keys < num_keys
            if FORM.windowed:
                allowed = allowed & ((keys >= low) | (keys < sizes.sinks))
            logits = gl.where(allowed, _logits(qk, scale, scales.softcap_log2, FORM.softcap), float("-inf"))
            p, alpha, row_max, row_sum = _softmax(logits, row_max, row_sum)
            stage = (tiles - 1) % RING
            keys_left = num_keys - (first_tile + num_tiles - 1) * BN
            v = values(stage, v_s, keys_left, BN, BOX, V_OPERAND, D_WARPS, True)
            acc = mma_v2(gl.convert_layout(p.to(COMPUTE), P_OPERAND), v, rescale(acc, alpha[:, :, None], WARPS))

            largest_max = gl.max(row_max, 0)
            safe = gl.where(largest_max == float("-inf"), 0.0, largest_max)
            weights = gl.exp2(row_max - safe[None, :])
            row_sum = gl.convert_layout(gl.sum(row_sum, 2), gl.SliceLayout(2, S), assert_trivial=True)
            total = gl.sum(row_sum * weights, 0)
            seen = total > 0.0
            safe_total = gl.where(seen, total, 1.0)
            split_weights = weights / safe_total[None, :]
            if FP8:
                split_weights = split_weights * v_factor
            x = acc * split_weights[:, :, None]
            if GROUP <= 8:  # half of the rows are of no use
                x, _ = x.reshape([SLICES, 2, 8, D]).permute([0, 2, 3, 1]).split()
            base = (seq * FORM.kv_heads + kv_head).to(gl.int64) * sizes.num_splits
            _store_sum(x, output.split_out + (base + split) * (GROUP * D), 0, GROUP, D, D_WARPS, FP8)
            LSE: gl.constexpr = total.type.layout
            heads = gl.arange(0, ROWS, LSE)
            split_result = gl.where(seen, largest_max + gl.log2(safe_total), float("-inf"))
            gl.store(output.split_lse + (base + split) * GROUP + heads, split_result, mask=heads < GROUP)

            barrier()  # all of this program's stores come before its arrival, and before that all of its loads
            mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.arrive(buffers.message_empty.index(slot), count=1)
            arrival = arrivals + seq * FORM.kv_heads + kv_head
            if gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == count - 1:
                gl.store(arrival, 0)
                merge(output, base, count, row, kv_head, WARPS, FORM)


@gluon.jit(
    do_not_specialize=["stride_table", *Sizes._fields],
    # They are parts of larger tensors and begin anywhere in them; each alignment would be compiled anew.
    do_not_specialize_on_alignment=["cu_q", "context_lens", "table", "counters"],
)
def decode_kernel(
    q_desc,
    k_desc,
    v_desc,
    split_out,
    split_lse,
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
    least_keys,
    max_splits,
    scale_log2,
    softcap_log2,
    FORM: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Any number of programs. See `decode_arguments` for the groups. `counters` are all 0 before and after: the queue's
    next item, programs that are done, and for each (sequence, KV head) the splits that are done."""
    WARPS: gl.constexpr = gl.num_warps()
    RING: gl.constexpr = FORM.ring
    BN: gl.constexpr = FORM.block_n
    D: gl.constexpr = FORM.head_dim
    MESSAGES: gl.constexpr = FORM.messages
    if OVERLAP:  # as `overlap.follow`; the producer begins after this
        gl.inline_asm_elementwise(_FOLLOW, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
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
    output = Output(split_out, split_lse, out, lse, stride_ot, stride_oh, stride_lt, stride_lh, sink_logits)
    pages = Pages(cu_q, context_lens, table, stride_table)
    sizes = Sizes(num_seqs, window, sinks, num_splits, least_keys, max_splits)
    scales = Scales(scale_log2, softcap_log2, k_scale, v_scale)
    buffers = Buffers(q_s, k_s, v_s, message_s, full, empty, message_full, message_empty)
    # fmt: off
    gl.warp_specialize([
        (_consume, (output, counters + 2, sizes, scales, buffers, WARPS, FORM)),
        (produce, (q_desc, k_desc, v_desc, pages, scales, counters, sizes, buffers, FORM)),
    ], [1], [FORM.producer_registers])
    # fmt: on
