"""The forward kernel for Hopper (sm_90), in Gluon: persistent, warp-specialised, fed by the tensor memory accelerator.

FlashAttention-3 (Shah et al. 2024), section 3.1 and 3.2: a producer warp streams tiles of K and V through rings in
shared memory; each consumer warpgroup owns 64 queries and runs the product Q K^T of one tile beside P V of the tile
before it, with the softmax between them. Dense, sliding-window and block-sparse attention share one loop over the key
tiles of a work item (`work_items`); only tiles that a mask cuts are masked. A program takes several items, and brings
the tiles of the next one while its consumers still finish the last
(docs/dev/kernel-log.md#hopper-forward says what each of this is worth).

Every tensor is seen as (heads, rows, D), so that one kernel serves dense, ragged and paged batches, and a box of the
accelerator that reaches beyond a tensor's end or its head dim reads zeros. In a ragged batch it may reach into the next
sequence: those keys are masked, and their values set to zero, for 0 times NaN is NaN.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from longreach_kernels.backends.hopper.forward_arguments import Batch, Lists, Logits, Output, Pages, Sizes, Split
from longreach_kernels.backends.hopper.forward_producer import (
    Buffers,
    Queries,
    Tiles,
    Turns,
    barriers,
    next_item,
    produce,
)
from longreach_kernels.backends.hopper.forward_products import (
    ROWS,
    accumulator,
    issue_scores,
    issue_sum,
    pack,
    quantize_queries,
)
from longreach_kernels.backends.hopper.softmax import rescale, row_sums, softmax_step
from longreach_kernels.backends.hopper.work_items import find_item, tile_of

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
P_OFFSET = gl.constexpr(5)  # see `softmax_step`


@gluon.jit
def _mask(qk, rows, step, batch, item, S: gl.constexpr, FORM: gl.constexpr):
    """Products of one tile, -inf where the query may not see the key. `rows` count from the item's first query."""
    BN: gl.constexpr = FORM.block_n
    columns = gl.arange(0, BN, gl.SliceLayout(0, S))
    if FORM.listed:
        words: gl.constexpr = BN // 32
        allowed = (columns < item.num_keys)[None, :] & (rows >= 0)[:, None]  # nothing, if the item has no tiles
        if step < item.steps.right:
            bit_tile = gl.load(batch.lists.bit_index + item.steps.last_entry - step).to(gl.int64)
            pointers = (
                batch.lists.bits + bit_tile * (FORM.block_m * words) + rows[:, None] * words + columns[None, :] // 32
            )
            allowed = ((gl.load(pointers) >> (columns % 32)[None, :]) & 1) != 0
    else:
        # One bound for each row and side, counted from the tile's first key, in place of tests of pairs.
        start = tile_of(batch, item, step, FORM) * BN
        position = item.num_keys - item.num_queries + item.first - start + rows
        end = item.num_keys - start + gl.zeros_like(rows)
        if FORM.causal:
            end = gl.minimum(end, position + 1)
        allowed = columns[None, :] < end[:, None]
        if FORM.windowed:
            near = columns[None, :] > (position - batch.sizes.window)[:, None]
            allowed = allowed & (near | (columns < batch.sizes.sinks - start)[None, :])
    return gl.where(allowed, qk, float("-inf"))


@gluon.jit
def _zero_beyond(v, keys_left, BN: gl.constexpr):
    """Set the values of keys beyond the end of a sequence to zero. Both consumers do, with the same result."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    values = v.load(layout)
    rows = gl.arange(0, BN, gl.SliceLayout(1, layout))
    v.store(gl.where((rows < keys_left)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _store_rows(output, result, c: gl.constexpr, item, SPLIT: gl.constexpr):
    """Store the rows (ROWS, D) of a consumer that belong to the item's sequence, one by one."""
    O: gl.constexpr = result.type.layout  # noqa: E741
    rows = c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, O))
    columns = gl.arange(0, result.shape[1], gl.SliceLayout(0, O))
    place = item.q_outer * output.stride_oh + (item.q_row + rows).to(gl.int64) * output.stride_ot
    if SPLIT:
        place += item.split.to(gl.int64) * output.stride_os
    inside = (item.first + rows < item.num_queries)[:, None] & (columns < output.head_dim)[None, :]
    gl.store(output.out + place[:, None] + columns[None, :], result, mask=inside)


@gluon.jit
def _walk(begin, end, origin, running, q, scale, rows, batch, item, buffers, FORM: gl.constexpr, MASKED: gl.constexpr):
    """Steps `begin` to `end` of an item whose first step is the `origin`-th of its program: Q K^T of each beside P V of
    the one before, whose p is carried on. Of 8-bit floats its P V is, too, and added up beside the next Q K^T.

    `running` is (p, acc, tile_sum, alpha, row_max, row_sum), and what is returned."""
    RING: gl.constexpr = FORM.ring
    BN: gl.constexpr = FORM.block_n
    D: gl.constexpr = FORM.head_dim
    dtype: gl.constexpr = buffers.tiles.k.dtype
    FP8: gl.constexpr = dtype == gl.float8e4nv
    OFFSET: gl.constexpr = P_OFFSET if FP8 else 0
    S: gl.constexpr = accumulator(BN, dtype)
    O: gl.constexpr = accumulator(D, dtype)  # noqa: E741
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O)
    p, acc, tile_sum, alpha, row_max, row_sum = running
    for step in range(begin, end):
        n = origin + step
        slot = n % RING
        before = (n - 1) % RING
        mbarrier.wait(buffers.tiles.k_full.index(slot), (n // RING) & 1)
        qk_next = issue_scores(q, buffers.tiles.k.index(slot), BN, D)
        if FP8:
            acc = rescale(acc + tile_sum, gl.convert_layout(alpha, O_ROWS)[:, None])
        mbarrier.wait(buffers.tiles.v_full.index(before), ((n - 1) // RING) & 1)
        product, kept = issue_sum(p, buffers.tiles.v.index(before), acc, BN, D)
        qk = warpgroup_mma_wait(1, deps=(qk_next,))
        mbarrier.arrive(buffers.tiles.k_empty.index(slot), count=1)
        if MASKED:
            qk = _mask(qk, rows, step, batch, item, S, FORM)
        p32, alpha, row_max, row_sum = softmax_step(
            qk, row_max, row_sum, scale, batch.logits.softcap_log2, FORM.softcap, OFFSET
        )
        # Open already. The assembler likes to wait for P V first and to compute the softmax beside nothing, but it
        # moves that wait across no loop, and this barrier's wait is one.
        mbarrier.wait(buffers.tiles.v_full.index(before), ((n - 1) // RING) & 1)
        product, kept = warpgroup_mma_wait(0, deps=(product, kept))
        mbarrier.arrive(buffers.tiles.v_empty.index(before), count=1)
        if FP8:
            tile_sum = product
        else:
            acc = rescale(product, gl.convert_layout(alpha, O_ROWS)[:, None])
        p = pack(p32, dtype)
    return p, acc, tile_sum, alpha, row_max, row_sum


@gluon.jit
def _consume(c: gl.constexpr, o_desc, output, batch, buffers, FORM: gl.constexpr):
    """Consumer warpgroup c: the 64 queries from 64 c on of each item."""
    RING: gl.constexpr = FORM.ring
    BN: gl.constexpr = FORM.block_n
    D: gl.constexpr = FORM.head_dim
    dtype: gl.constexpr = buffers.tiles.k.dtype
    FP8: gl.constexpr = dtype == gl.float8e4nv
    OFFSET: gl.constexpr = P_OFFSET if FP8 else 0
    S: gl.constexpr = accumulator(BN, dtype)
    O: gl.constexpr = accumulator(D, dtype)  # noqa: E741
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O)
    rows = c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    logits = batch.logits
    q = buffers.queries.operand.index(c).reshape([ROWS, D])
    o = buffers.queries.out.index(c).reshape([ROWS, D])
    origin = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    filled = gl.to_tensor(0)
    index = next_item(turn, buffers.turns)
    while index < batch.sizes.num_items:
        item = find_item(batch, index, FORM)
        steps = item.steps
        if steps.count > 0:
            row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
            row_sum = row_sums(gl.zeros([ROWS, BN], gl.float32, S))
            if FORM.sink_logits:  # one more column of the softmax, without a value
                sink = gl.load(logits.sink_logits + item.head).to(gl.float32) * LOG2E
                row_max = gl.maximum(row_max, sink - OFFSET)
                row_sum += 0.25 * 2**OFFSET
            acc = gl.zeros([ROWS, D], gl.float32, O)
            slot = origin % RING
            parity = (origin // RING) & 1
            mbarrier.wait(buffers.queries.full.index(c), filled & 1)
            if FP8:
                factor = logits.scale_log2 * gl.load(logits.k_scale + item.head // FORM.group)
                scale = (
                    quantize_queries(buffers.queries.q.index(c).reshape([ROWS, D]), q, gl.SliceLayout(1, S)) * factor
                )
                mbarrier.arrive(buffers.queries.empty.index(c), count=1)
            else:
                scale = logits.scale_log2
            mbarrier.wait(buffers.tiles.k_full.index(slot), parity)
            qk = warpgroup_mma_wait(0, deps=(issue_scores(q, buffers.tiles.k.index(slot), BN, D),))
            mbarrier.arrive(buffers.tiles.k_empty.index(slot), count=1)
            qk = _mask(qk, rows, 0, batch, item, S, FORM)
            p, alpha, row_max, row_sum = softmax_step(
                qk, row_max, row_sum, scale, batch.logits.softcap_log2, FORM.softcap, OFFSET
            )
            p = pack(p, dtype)
            if not FP8 and (FORM.ragged or FORM.listed):
                keys_left = item.num_keys - tile_of(batch, item, 0, FORM) * BN
                if keys_left < BN:
                    mbarrier.wait(buffers.tiles.v_full.index(slot), parity)
                    _zero_beyond(buffers.tiles.v.index(slot).reshape([BN, D]), keys_left, BN)
            tile_sum = gl.zeros([ROWS, D], gl.float32, O) if FP8 else gl.to_tensor(0)  # 16-bit products need none
            running = (p, acc, tile_sum, alpha, row_max, row_sum)
            running = _walk(1, steps.right, origin, running, q, scale, rows, batch, item, buffers, FORM, True)
            begin = gl.maximum(steps.right, 1)
            running = _walk(begin, steps.middle, origin, running, q, scale, rows, batch, item, buffers, FORM, False)
            if FORM.windowed:
                begin = gl.maximum(steps.middle, 1)
                running = _walk(begin, steps.count, origin, running, q, scale, rows, batch, item, buffers, FORM, True)
            p, acc, tile_sum, alpha, row_max, row_sum = running
            origin += steps.count
            filled += 1
            last = (origin - 1) % RING
            if FORM.own_out and not FP8:
                mbarrier.arrive(buffers.queries.empty.index(c), count=1)
            mbarrier.wait(buffers.tiles.v_full.index(last), ((origin - 1) // RING) & 1)
            product, kept = issue_sum(p, buffers.tiles.v.index(last), acc, BN, D)
            product, kept = warpgroup_mma_wait(0, deps=(product, kept))
            mbarrier.arrive(buffers.tiles.v_empty.index(last), count=1)
            if FP8:
                acc = rescale(acc + tile_sum, gl.convert_layout(alpha, O_ROWS)[:, None]) + product
            else:
                acc = product

            row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, S))
            seen = row_sum > 0.0
            safe_sum = gl.where(seen, row_sum, 1.0)
            if FP8:
                acc *= gl.load(logits.v_scale + item.head // FORM.group)
            result = (acc / gl.convert_layout(safe_sum, gl.SliceLayout(1, O))[:, None]).to(output.out.dtype.element_ty)
            row_lse = gl.where(seen, (row_max + gl.log2(safe_sum)) * LN2, float("-inf"))
            lse_rows = (
                output.lse + item.q_outer * output.stride_lh + (item.q_row + rows).to(gl.int64) * output.stride_lt
            )
            if FORM.split:
                lse_rows += item.split.to(gl.int64) * output.stride_ls
            gl.store(lse_rows, row_lse, mask=item.first + rows < item.num_queries)
            if FORM.split:
                _store_rows(output, result, c, item, FORM.split)
            elif not FORM.ragged or item.first + (c + 1) * ROWS <= item.num_queries:
                tma.store_wait(0)  # of the item before: its copy may still read the buffer
                o.store(result)
                fence_async_shared()
                coordinates = [item.q_outer, item.q_row + c * ROWS, 0]
                tma.async_copy_shared_to_global(o_desc, coordinates, buffers.queries.out.index(c))
            else:  # the box would write over the next sequence
                _store_rows(output, result, c, item, FORM.split)
            if not FORM.own_out:
                tma.store_wait(0)
                mbarrier.arrive(buffers.queries.empty.index(c), count=1)
        turn += 1
        index = next_item(turn, buffers.turns)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        *("stride_lh", "stride_lt", "stride_ls", "stride_oh", "stride_ot", "stride_os", "head_dim"),
        *("stride_table", "tiles_of_seq"),
        *Sizes._fields,
        "sharing",
        *Split._fields,
    ],
    # A step's sequences behind its decodes begin anywhere in these; each alignment would be compiled anew.
    do_not_specialize_on_alignment=["cu_q", "cu_k", "context_lens", "table"],
)
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out,
    lse,
    counter,
    stride_lh,
    stride_lt,
    stride_oh,
    stride_ot,
    head_dim,
    cu_q,
    cu_k,
    context_lens,
    table,
    stride_table,
    num_seqs,
    num_queries,
    num_keys,
    heads,
    section,
    num_items,
    window,
    sinks,
    first_row,
    start,
    partial,
    tiles,
    order,
    sharing,
    bits,
    bit_index,
    sink_logits,
    scale_log2,
    softcap_log2,
    k_scale,
    v_scale,
    tiles_of_seq,
    num_splits,
    least_tiles,
    whole_tiles,
    stride_ls,
    stride_os,
    FORM: gl.constexpr,
):
    """Grid: any number of programs up to `num_items`; they share `counter`, which is 0 at first.

    See `forward_arguments` for the groups. Of splits `o_desc` is not used.
    """
    CONSUMERS: gl.constexpr = FORM.consumers
    RING: gl.constexpr = FORM.ring
    BN: gl.constexpr = FORM.block_n
    D: gl.constexpr = FORM.head_dim
    V_TILE: gl.constexpr = v_desc.block_type.shape
    output = Output(out, lse, stride_lh, stride_lt, stride_ls, stride_oh, stride_ot, stride_os, head_dim)
    batch = Batch(
        Pages(cu_q, cu_k, context_lens, table, stride_table, tiles_of_seq),
        Sizes(num_seqs, num_queries, num_keys, heads, section, num_items, window, sinks),
        Lists(first_row, start, partial, tiles, order, sharing, bits, bit_index),
        Split(num_splits, least_tiles, whole_tiles),
        Logits(scale_log2, softcap_log2, sink_logits, k_scale, v_scale),
    )
    q = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, ROWS, D], q_desc.layout)
    operand = q
    if k_desc.dtype == gl.float8e4nv:
        Q8: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, ROWS, D], gl.float8e4nv)
        operand = gl.allocate_shared_memory(gl.float8e4nv, [CONSUMERS, 1, ROWS, D], Q8)
    o = q
    if FORM.own_out:
        o = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [RING, 1, BN, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [RING, 1, V_TILE[1], V_TILE[2]], v_desc.layout)
    queries = Queries(q, operand, o, barriers(CONSUMERS, 1), barriers(CONSUMERS, 1))
    # fmt: off
    ring = Tiles(
        k, v, barriers(RING, 1), barriers(RING, CONSUMERS), barriers(RING, 1), barriers(RING, CONSUMERS))
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    buffers = Buffers(queries, ring, Turns(numbers, barriers(2, 1), barriers(2, CONSUMERS)))
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (0, o_desc, output, batch, buffers, FORM)),
            (_consume, (1, o_desc, output, batch, buffers, FORM)),
            (produce, (q_desc, k_desc, v_desc, counter, batch, buffers, FORM)),
        ], [4, 1], [FORM.registers, FORM.producer_registers])
    else:
        gl.warp_specialize([
            (_consume, (0, o_desc, output, batch, buffers, FORM)),
            (_consume, (1, o_desc, output, batch, buffers, FORM)),
            (_consume, (2, o_desc, output, batch, buffers, FORM)),
            (produce, (q_desc, k_desc, v_desc, counter, batch, buffers, FORM)),
        ], [4, 4, 1], [FORM.registers, FORM.registers, FORM.producer_registers])
    # fmt: on
