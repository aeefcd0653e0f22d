"""The forward kernel for Hopper (sm_90), in Gluon: warp-specialised, fed by the tensor memory accelerator (TMA).

FlashAttention-3 (Shah et al. 2024), section 3.1 and 3.2: a producer warp streams tiles of K and V through rings in
shared memory; each consumer warpgroup owns 64 queries and runs the product Q K^T of one tile beside P V of the tile
before it, with the softmax between them. Key tiles are walked right to left, so that the tiles that need a mask under a
causal mask come first; only the tiles at the mask's edges are masked at all.

Queries, keys and outputs are addressed as rows and columns of matrices (`launch`), so one kernel serves dense, ragged
and
paged batches. A TMA box may read past a sequence's end, into another sequence or zeros: those keys are masked.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of queries, a consumer warpgroup: the M of one wgmma


@gluon.jit
def _mask(qk, q_positions, keys, num_keys, window, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr):
    """Logits of one tile, -inf where the query may not see the key."""
    allowed = keys[None, :] < num_keys
    if CAUSAL:
        allowed = allowed & (keys[None, :] <= q_positions[:, None])
    if WINDOWED:
        allowed = allowed & (keys[None, :] > q_positions[:, None] - window)
    return gl.where(allowed, qk, float("-inf"))


@gluon.jit
def _softmax(qk, row_max, row_sum, scale_log2):
    """One step of the online softmax in base 2 (Milakov and Gimelshein 2018): p, the old rows' factor, maximum, sum."""
    new_max = gl.maximum(row_max, gl.max(qk, 1))
    safe = gl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet: no inf - inf
    p = gl.exp2(qk * scale_log2 - (safe * scale_log2)[:, None])
    alpha = gl.exp2((row_max - safe) * scale_log2)
    return p, alpha, new_max, row_sum * alpha + gl.sum(p, 1)


@gluon.jit
def _produce(
    q_desc,
    k_desc,
    v_desc,
    table,
    q_s,
    k_s,
    v_s,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    q_row,
    q_col,
    kv_row,
    kv_col,
    last_tile,
    num_tiles,
    BN: gl.constexpr,
    RING: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """The producer warp: the queries once, then every key tile, right to left."""
    for c in gl.static_range(CONSUMERS):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [q_row + ROWS * c, q_col], q_full.index(c), q_s.index(c))
    row = kv_row + last_tile * BN
    if PAGE_SIZE:
        row = gl.load(table + last_tile * BN // PAGE_SIZE) * PAGE_SIZE + last_tile * BN % PAGE_SIZE
    for i in range(num_tiles):
        slot = i % RING
        phase = ((i // RING) & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row, kv_col], k_full.index(slot), k_s.index(slot))
        # The next tile's page id is on its way while this one waits for room.
        next_tile = gl.maximum(last_tile - i - 1, 0)
        next_row = kv_row + next_tile * BN
        if PAGE_SIZE:
            next_row = gl.load(table + next_tile * BN // PAGE_SIZE) * PAGE_SIZE + next_tile * BN % PAGE_SIZE
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [row, kv_col], v_full.index(slot), v_s.index(slot))
        row = next_row


@gluon.jit
def _consume(
    c: gl.constexpr,
    o_desc,
    out_ptr,
    lse_ptr,
    q_s,
    k_s,
    v_s,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    o_row,
    o_col,
    stride_o,
    lse_offset,
    stride_l,
    row_in_seq,
    num_queries,
    num_keys,
    last_tile,
    right,
    middle,
    num_tiles,
    window,
    scale_log2,
    BN: gl.constexpr,
    D: gl.constexpr,
    RING: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """Consumer warpgroup c: queries `row_in_seq + 64 c` and the 63 after it."""
    dtype: gl.constexpr = q_s.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    rows = row_in_seq + c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    q_positions = rows + num_keys - num_queries
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([ROWS, D], gl.float32, O)
    zero = gl.zeros([ROWS, BN], gl.float32, S)
    q = q_s.index(c)
    mbarrier.wait(q_full.index(c), 0)
    mbarrier.wait(k_full.index(0), 0)
    qk = warpgroup_mma(q, k_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    mbarrier.arrive(k_empty.index(0), count=1)
    keys = last_tile * BN + gl.arange(0, BN, gl.SliceLayout(0, S))
    qk = _mask(qk, q_positions, keys, num_keys, window, CAUSAL, WINDOWED)
    p, _, row_max, row_sum = _softmax(qk, row_max, row_sum, scale_log2)
    p_op = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, O, 2))
    # One loop for masked and unmasked tiles: carried from one loop into another, p_op would be unpacked and packed
    # again in every step (64 of 519 instructions).
    for i in range(1, num_tiles):
        slot = i % RING
        previous = (i - 1) % RING
        mbarrier.wait(k_full.index(slot), (i // RING) & 1)
        qk_next = warpgroup_mma(q, k_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(previous), ((i - 1) // RING) & 1)
        acc_next = warpgroup_mma(p_op, v_s.index(previous), acc, is_async=True)
        qk = warpgroup_mma_wait(1, deps=(qk_next,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        if CAUSAL or WINDOWED:  # noqa: SIM102 - the outer condition is known to the compiler, the inner one is not
            if (i < right) | (i >= middle):
                keys = (last_tile - i) * BN + gl.arange(0, BN, gl.SliceLayout(0, S))
                qk = _mask(qk, q_positions, keys, num_keys, window, CAUSAL, WINDOWED)
        p, alpha, row_max, row_sum = _softmax(qk, row_max, row_sum, scale_log2)
        acc, p_op = warpgroup_mma_wait(0, deps=(acc_next, p_op))
        mbarrier.arrive(v_empty.index(previous), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        p_op = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, O, 2))
    last = (num_tiles - 1) % RING
    mbarrier.wait(v_full.index(last), ((num_tiles - 1) // RING) & 1)
    acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(p_op, v_s.index(last), acc, is_async=True),))
    mbarrier.arrive(v_empty.index(last), count=1)

    seen = row_sum > 0.0
    safe_sum = gl.where(seen, row_sum, 1.0)
    lse = gl.where(seen, (row_max * scale_log2 + gl.log2(safe_sum)) * LN2, float("-inf"))
    gl.store(lse_ptr + lse_offset + rows.to(gl.int64) * stride_l, lse, mask=rows < num_queries)
    out = (acc / gl.convert_layout(safe_sum, gl.SliceLayout(1, O))[:, None]).to(dtype)
    if row_in_seq + (c + 1) * ROWS <= num_queries:
        q.store(out)  # the queries are not needed any more
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [o_row + c * ROWS, o_col], q)
        tma.store_wait(0)
    else:  # the box would write over the next sequence
        o_rows = c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, O))
        o_cols = gl.arange(0, D, gl.SliceLayout(0, O))
        pointers = out_ptr + (o_row + o_rows).to(gl.int64)[:, None] * stride_o + (o_col + o_cols)[None, :]
        gl.store(pointers, out, mask=(row_in_seq + o_rows < num_queries)[:, None])


# fmt: off
@gluon.jit
def _consume_0(
    o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col, stride_o,
    lse_offset,
    stride_l, row_in_seq, num_queries, num_keys, last_tile, right, middle, num_tiles, window, scale_log2,
    BN: gl.constexpr, D: gl.constexpr, RING: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):
    _consume(
        0, o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col, stride_o,
        lse_offset, stride_l, row_in_seq, num_queries, num_keys, last_tile, right, middle, num_tiles, window,
        scale_log2,
        BN, D, RING, CAUSAL, WINDOWED,
    )


@gluon.jit
def _consume_1(
    o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col, stride_o,
    lse_offset,
    stride_l, row_in_seq, num_queries, num_keys, last_tile, right, middle, num_tiles, window, scale_log2,
    BN: gl.constexpr, D: gl.constexpr, RING: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):
    _consume(
        1, o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col, stride_o,
        lse_offset, stride_l, row_in_seq, num_queries, num_keys, last_tile, right, middle, num_tiles, window,
        scale_log2,
        BN, D, RING, CAUSAL, WINDOWED,
    )


@gluon.jit
def _consume_2(
    o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col, stride_o,
    lse_offset,
    stride_l, row_in_seq, num_queries, num_keys, last_tile, right, middle, num_tiles, window, scale_log2,
    BN: gl.constexpr, D: gl.constexpr, RING: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):
    _consume(
        2, o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col, stride_o,
        lse_offset, stride_l, row_in_seq, num_queries, num_keys, last_tile, right, middle, num_tiles, window,
        scale_log2,
        BN, D, RING, CAUSAL, WINDOWED,
    )
# fmt: on


@gluon.jit
def _find_sequence(cu_q, num_seqs, slot, BM: gl.constexpr):
    """The sequence whose query tiles hold `slot`, and its first slot; see `portable.primitives.find_sequence`."""
    origin = gl.load(cu_q)
    low = 0
    high = num_seqs
    while low + 1 < high:
        middle = (low + high) // 2
        if (gl.load(cu_q + middle) - origin) // BM + middle <= slot:
            low = middle
        else:
            high = middle
    return low, (gl.load(cu_q + low) - origin) // BM + low


@gluon.jit(do_not_specialize=["num_seqs", "dense_queries", "dense_keys", "window", "stride_table"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out_ptr,
    lse_ptr,
    cu_q,
    cu_k,
    context_lens,
    table,
    stride_table,
    q_head_row,
    q_head_col,
    kv_head_row,
    kv_head_col,
    o_head_row,
    o_head_col,
    stride_o,
    stride_lb,
    stride_lh,
    stride_lt,
    num_seqs,
    dense_queries,
    dense_keys,
    window,
    scale_log2,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    RING: gl.constexpr,
    CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """Grid (Hq, query tiles of 64 x CONSUMERS rows). Head h of a tensor starts `head_row * h` rows down and `head_col
    * h`
    columns across its first one. Dense batches have `dense_*` tokens a sequence and their heads one below another."""
    BM: gl.constexpr = ROWS * CONSUMERS
    head = gl.program_id(0)
    slot = gl.num_programs(1) - 1 - gl.program_id(1)  # the longest rows of a causal mask first
    kv_head = head // GROUP
    if RAGGED:
        seq, first_slot = _find_sequence(cu_q, num_seqs, slot, BM)
        q_start = gl.load(cu_q + seq)
        num_queries = gl.load(cu_q + seq + 1) - q_start
        tile = slot - first_slot
        o_start = q_start
        lse_offset = q_start.to(gl.int64) * stride_lt + head * stride_lh
        if PAGE_SIZE:
            num_keys = gl.load(context_lens + seq)
            k_start = 0
        else:
            k_start = gl.load(cu_k + seq)
            num_keys = gl.load(cu_k + seq + 1) - k_start
    else:
        seq = slot % num_seqs
        tile = slot // num_seqs
        num_queries = dense_queries
        num_keys = dense_keys
        q_start = seq * (gl.num_programs(0) * dense_queries)
        o_start = q_start
        k_start = seq * (gl.num_programs(0) // GROUP * dense_keys)
        lse_offset = seq.to(gl.int64) * stride_lb + head * stride_lh
    if tile * BM < num_queries:
        q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, D], q_desc.layout)
        k_s = gl.allocate_shared_memory(q_desc.dtype, [RING, BN, D], k_desc.layout)
        v_s = gl.allocate_shared_memory(q_desc.dtype, [RING, BN, D], v_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(CONSUMERS):
            mbarrier.init(q_full.index(i), count=1)
        for i in gl.static_range(RING):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=CONSUMERS)
            mbarrier.init(v_empty.index(i), count=CONSUMERS)
        fence_async_shared()

        # The ranges of `tiles.key_ranges`, for the queries at positions low <= q < high.
        low = num_keys - num_queries + tile * BM
        high = num_keys - num_queries + gl.minimum((tile + 1) * BM, num_queries)
        seen_end = num_keys
        full_end = num_keys
        if CAUSAL:
            seen_end = gl.maximum(gl.minimum(num_keys, high), 0)
            full_end = gl.maximum(gl.minimum(num_keys, low + 1), 0)
        stop = gl.maximum(gl.cdiv(seen_end, BN), 1)  # rows that see nothing visit one tile and mask all of it
        first = 0
        inner = 0
        if WINDOWED:
            first = gl.minimum(gl.maximum(low - window + 1, 0) // BN, stop - 1)
            inner = gl.minimum(gl.cdiv(gl.maximum(high - window, 0), BN), stop)
        inner_end = gl.maximum(full_end // BN, inner)
        # Steps count from the right: masked before `right`, free of masking before `middle`, masked before `num_tiles`.
        last_tile = stop - 1
        right = stop - gl.minimum(inner_end, stop)
        middle = stop - gl.maximum(inner, first)
        num_tiles = stop - first

        row_in_seq = tile * BM
        q_row = q_start + head * q_head_row + row_in_seq
        o_row = o_start + head * o_head_row + row_in_seq
        kv_row = k_start + kv_head * kv_head_row
        q_col = head * q_head_col
        o_col = head * o_head_col
        kv_col = kv_head * kv_head_col
        seq_table = table + seq.to(gl.int64) * stride_table
        # fmt: off
        if CONSUMERS == 2:
            gl.warp_specialize([
                (_consume_0, (
                    o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col,
                    stride_o, lse_offset, stride_lt, row_in_seq, num_queries, num_keys, last_tile, right, middle,
                    num_tiles, window, scale_log2, BN, D, RING, CAUSAL, WINDOWED)),
                (_consume_1, (
                    o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col,
                    stride_o, lse_offset, stride_lt, row_in_seq, num_queries, num_keys, last_tile, right, middle,
                    num_tiles, window, scale_log2, BN, D, RING, CAUSAL, WINDOWED)),
                (_produce, (
                    q_desc, k_desc, v_desc, seq_table, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, q_row,
                    q_col, kv_row, kv_col, last_tile, num_tiles, BN, RING, CONSUMERS, PAGE_SIZE)),
            ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])
        else:
            gl.warp_specialize([
                (_consume_0, (
                    o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col,
                    stride_o, lse_offset, stride_lt, row_in_seq, num_queries, num_keys, last_tile, right, middle,
                    num_tiles, window, scale_log2, BN, D, RING, CAUSAL, WINDOWED)),
                (_consume_1, (
                    o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col,
                    stride_o, lse_offset, stride_lt, row_in_seq, num_queries, num_keys, last_tile, right, middle,
                    num_tiles, window, scale_log2, BN, D, RING, CAUSAL, WINDOWED)),
                (_consume_2, (
                    o_desc, out_ptr, lse_ptr, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_row, o_col,
                    stride_o, lse_offset, stride_lt, row_in_seq, num_queries, num_keys, last_tile, right, middle,
                    num_tiles, window, scale_log2, BN, D, RING, CAUSAL, WINDOWED)),
                (_produce, (
                    q_desc, k_desc, v_desc, seq_table, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, q_row,
                    q_col, kv_row, kv_col, last_tile, num_tiles, BN, RING, CONSUMERS, PAGE_SIZE)),
            ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])
        # fmt: on
