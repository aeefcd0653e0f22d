"""The consumer warpgroups of the Hopper forward kernel: products of a step, with the softmax between them.

Each owns 64 queries of an item. The assembler decides much of a step's cost, so what it made of it is tested
(`tests/kernels/compile_hopper.py`).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from longreach_kernels.backends.hopper.forward_producer import next_item
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
    """Store the rows (ROWS, value_dim) of a consumer that belong to the item's sequence, one by one."""
    O: gl.constexpr = result.type.layout  # noqa: E741
    rows = c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, O))
    columns = item.part * result.shape[1] + gl.arange(0, result.shape[1], gl.SliceLayout(0, O))
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
    VALUE_D: gl.constexpr = FORM.value_dim
    dtype: gl.constexpr = buffers.tiles.k.dtype
    FP8: gl.constexpr = dtype == gl.float8e4nv
    OFFSET: gl.constexpr = P_OFFSET if FP8 else 0
    S: gl.constexpr = accumulator(BN, dtype)
    O: gl.constexpr = accumulator(VALUE_D, dtype)  # noqa: E741
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
        product, kept = issue_sum(p, buffers.tiles.v.index(before), acc, BN, VALUE_D)
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
def consume(c: gl.constexpr, o_desc, output, batch, buffers, FORM: gl.constexpr):
    """Consumer warpgroup c: the 64 queries from 64 c on of each item."""
    RING: gl.constexpr = FORM.ring
    BN: gl.constexpr = FORM.block_n
    D: gl.constexpr = FORM.head_dim
    VALUE_D: gl.constexpr = FORM.value_dim
    dtype: gl.constexpr = buffers.tiles.k.dtype
    FP8: gl.constexpr = dtype == gl.float8e4nv
    OFFSET: gl.constexpr = P_OFFSET if FP8 else 0
    S: gl.constexpr = accumulator(BN, dtype)
    O: gl.constexpr = accumulator(VALUE_D, dtype)  # noqa: E741
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
            acc = gl.zeros([ROWS, VALUE_D], gl.float32, O)
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
                    _zero_beyond(buffers.tiles.v.index(slot).reshape([BN, VALUE_D]), keys_left, BN)
            tile_sum = gl.zeros([ROWS, VALUE_D], gl.float32, O) if FP8 else gl.to_tensor(0)  # 16-bit products need none
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
            product, kept = issue_sum(p, buffers.tiles.v.index(last), acc, BN, VALUE_D)
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
            gl.store(lse_rows, row_lse, mask=(item.first + rows < item.num_queries) & (item.part == 0))
            if FORM.split or VALUE_D < D:  # a part is narrower than the queries' memory
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
