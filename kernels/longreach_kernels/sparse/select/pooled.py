"""The pooled estimates in Triton: the mean of each block of keys, and for the second-order one their variance; then
each query's softmax over the blocks, in one pass over the products.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longreach_kernels.backends.triton.primitives import find_sequence, load_rows, logits_log2, tile_pointers
from longreach_kernels.sparse.select import estimators

# Log2 of a factor of the sums of exponentials: in half precision at most 8 blocks of a tile stay below 2^16, and what
# is more than 2^-26 of the maximum keeps its precision.
_HEADROOM: tl.constexpr = tl.constexpr(12.0)
_SPREAD: tl.constexpr = tl.constexpr(estimators.SPREAD)


class Form(NamedTuple):
    """What `pooled_kernel` is compiled for.

    Attributes:
        group: query heads of a KV head.
        head_dim, block_d: channels, and the power of two that they are padded to.
        block_n: blocks of a step.
        block_k: keys of a block.
        tile_q, tile_k: queries and keys of a tile.
        strips: parts of a query tile that are averaged apart.
        windowed, softcap, kv_scales: whether there are any.
        second: whether the estimate is the second-order one; its deviations count up to `frozen`.
        precision: of fp32 products.
    """

    group: int
    head_dim: int
    block_d: int
    block_n: int
    block_k: int
    tile_q: int
    tile_k: int
    strips: int
    windowed: bool
    softcap: bool
    kv_scales: bool
    second: bool
    frozen: float
    precision: str


class _Memory(NamedTuple):
    """The means of a head's blocks, and what a program keeps of its logits."""

    means: Any
    parts: Any
    maxima: Any


class _Reach(NamedTuple):
    """The positions of the queries, the window, and the end of the blocks that any of them sees."""

    position: Any
    window: Any
    end: Any


class _Scales(NamedTuple):
    """Of the logits, also in log2 units, and the softcap."""

    scale: Any
    scale_log2: Any
    softcap_log2: Any


@triton.jit(
    do_not_specialize=["stride_table", "blocks"],
    do_not_specialize_on_alignment=["ContextLens", "Table"],
)
def moments_kernel(
    K,
    Means,
    Variances,
    ContextLens,
    Table,
    k_strides,
    stride_table,
    blocks,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Grid (blocks, Hkv, B): Means and, if SECOND, `SPREAD` Variances (B, Hkv, blocks, D), of the keys that a block
    has; 0 where it has none."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    num_keys = tl.load(ContextLens + seq)
    offs_n = tl.arange(0, BLOCK_K)
    offs_d = tl.arange(0, BLOCK_D)
    at = ((seq.to(tl.int64) * tl.num_programs(1) + head) * blocks + block) * HEAD_DIM + offs_d
    if block * BLOCK_K >= num_keys:
        tl.store(Means + at, tl.zeros((BLOCK_D,), Means.dtype.element_ty), mask=offs_d < HEAD_DIM)
        if SECOND:
            tl.store(Variances + at, tl.zeros((BLOCK_D,), Variances.dtype.element_ty), mask=offs_d < HEAD_DIM)
        return
    base = K + head.to(tl.int64) * k_strides[1]
    table = Table + seq.to(tl.int64) * stride_table
    pointers = tile_pointers(base, table, block, offs_n, offs_d, num_keys, k_strides, BLOCK_K, PAGE_SIZE)
    keys = load_rows(pointers, block * BLOCK_K + offs_n, offs_d, num_keys, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    count = tl.minimum(num_keys - block * BLOCK_K, BLOCK_K)
    mean = tl.sum(keys, 0) / count.to(tl.float32)
    tl.store(Means + at, mean.to(Means.dtype.element_ty), mask=offs_d < HEAD_DIM)
    if SECOND:
        apart = tl.where((offs_n < count)[:, None], keys - mean[None, :], 0.0)
        variance = tl.sum(apart * apart, 0) * (_SPREAD / count.to(tl.float32))
        tl.store(Variances + at, variance.to(Variances.dtype.element_ty), mask=offs_d < HEAD_DIM)


@triton.jit
def _of_step(base, step, FORM: tl.constexpr):
    """(BLOCK_N, BLOCK_D): means or variances of the blocks of a step."""
    block = step * FORM.block_n + tl.arange(0, FORM.block_n)
    offs_d = tl.arange(0, FORM.block_d)
    pointers = base + block[:, None] * FORM.head_dim + offs_d[None, :]
    return load_rows(pointers, block, offs_d, 0, FORM.head_dim, FORM.block_d, False)


@triton.jit
def _deviations(squares, variances, step, FORM: tl.constexpr):
    """Of the products of the queries with the keys of a block, for the blocks of a step."""
    variance = _of_step(variances, step, FORM)
    # Squares times variances are never negative, nor are their sums.
    return tl.sqrt(tl.dot(squares, tl.trans(variance), input_precision=FORM.precision))


@triton.jit
def _step(step, running, q, deviation, memory, reach, scales, FORM: tl.constexpr, MASKED: tl.constexpr):
    """The queries against BLOCK_N blocks: ``running``, their maximum and sum, with these. The memory is given the sum
    of exponentials for each key tile, and what they are relative to. Not MASKED: all queries see all of the blocks."""
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    TILE_Q: tl.constexpr = FORM.tile_q
    PER: tl.constexpr = FORM.tile_k // FORM.block_k
    TILES: tl.constexpr = BLOCK_N // PER
    highest, total = running
    scale_log2 = scales.scale_log2
    mean = _of_step(memory.means, step, FORM)
    logits = tl.dot(q, tl.trans(mean), input_precision=FORM.precision)
    if FORM.second:
        # The excess of a deviation d is m (d - m / 2), where m is the lesser of d and the limit; these here are over
        # the scale, as the products are.
        least = tl.minimum(deviation, FORM.frozen / scales.scale)
        logits += least * (deviation * scales.scale - least * (0.5 * scales.scale))
    if FORM.softcap:
        logits = logits_log2(logits, scale_log2, scales.softcap_log2, True)
        scale_log2 = 1.0
    if MASKED:
        block = step * BLOCK_N + tl.arange(0, BLOCK_N)
        allowed = (block * BLOCK_K)[None, :] <= reach.position[:, None]
        if FORM.windowed:
            allowed = allowed & ((block * BLOCK_K + BLOCK_K)[None, :] > (reach.position - reach.window + 1)[:, None])
        logits = tl.where(allowed & (block < reach.end)[None, :], logits, float("-inf"))
    higher = tl.maximum(highest, tl.max(logits, 1) * scale_log2)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits * scale_log2 - (base - _HEADROOM)[:, None])
    sums = tl.sum(tl.reshape(weights, (TILE_Q, TILES, PER)), 2)
    total = total * tl.exp2(highest - base) + tl.sum(sums, 1)
    rows = tl.arange(0, TILE_Q)
    places = (step * TILES + tl.arange(0, TILES))[None, :] * TILE_Q + rows[:, None]
    tl.store(memory.parts + places, sums.to(memory.parts.dtype.element_ty))
    tl.store(memory.maxima + step * TILE_Q + rows, higher)
    return higher, total


@triton.jit(
    do_not_specialize=["num_seqs", "window", "slots", "heads", "key_tiles", "blocks", "steps"],
    do_not_specialize_on_alignment=["CuQ", "ContextLens"],
)
def pooled_kernel(
    Q,
    Means,
    Variances,
    KScale,
    Parts,
    Maxima,
    Mass,
    CuQ,
    ContextLens,
    stride_qt,
    stride_qh,
    num_seqs,
    window,
    slots,
    heads,
    key_tiles,
    blocks,
    steps,
    scale,
    scale_log2,
    softcap_log2,
    FORM: tl.constexpr,
):
    """Grid (programs,): Mass (Hq, slots, STRIPS, key_tiles) fp32, the mean over the queries of a strip of a tile, of
    squares for the second-order estimate.

    A program goes from item to item, each a slot and a head, and computes the logits of each once. What it keeps of
    them lies in the L2 cache: for each query and key tile the sum of exponentials, in Parts (programs, steps, tiles of
    a step, TILE_Q), relative to the maximum that the query had come to, in Maxima (programs, steps, TILE_Q) fp32. With
    the query's sum over all of its blocks they become shares.
    """
    HEAD_DIM: tl.constexpr = FORM.head_dim
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    TILE_Q: tl.constexpr = FORM.tile_q
    STRIPS: tl.constexpr = FORM.strips
    PER: tl.constexpr = FORM.tile_k // FORM.block_k
    TILES: tl.constexpr = BLOCK_N // PER
    CHUNK: tl.constexpr = 64 // TILES  # steps that become shares together, so that no load waits for another
    tl.static_assert(PER <= 8)
    program = tl.program_id(0)
    parts = Parts + program.to(tl.int64) * steps * (TILES * TILE_Q)
    maxima = Maxima + program.to(tl.int64) * steps * TILE_Q
    offs_m = tl.arange(0, TILE_Q)
    offs_d = tl.arange(0, FORM.block_d)
    turns = tl.cdiv(slots * heads - program, tl.num_programs(0))
    for turn in range(turns):
        # From late queries, which see the most keys, to early ones; a program's items lie as far apart as there are
        # programs, so that all have as much to do. Every other program begins with its last: what all of them keep at
        # a time is then half of what the longest would take.
        item = program + tl.where(program % 2 == 0, turn, turns - 1 - turn) * tl.num_programs(0)
        slot = slots - 1 - item // heads
        head = item % heads
        seq, first_slot = find_sequence(CuQ, num_seqs, slot, TILE_Q)
        q_start = tl.load(CuQ + seq)
        num_queries = tl.load(CuQ + seq + 1) - q_start
        first = (slot - first_slot) * TILE_Q
        rows = first + offs_m
        real = rows < num_queries
        q_ptrs = Q + (q_start + rows).to(tl.int64)[:, None] * stride_qt + head * stride_qh + offs_d[None, :]
        q = tl.load(q_ptrs, mask=real[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)
        squares = q
        if FORM.second:
            squares = (q.to(tl.float32) * q.to(tl.float32)).to(Variances.dtype.element_ty)
        kv_head = head // FORM.group
        unit = scale
        unit_log2 = scale_log2
        if FORM.kv_scales:
            k_scale = tl.load(KScale + kv_head)
            unit = scale * k_scale
            unit_log2 = scale_log2 * k_scale
        offset = tl.load(ContextLens + seq) - num_queries
        position = offset + rows
        head_at = (seq.to(tl.int64) * (heads // FORM.group) + kv_head) * blocks * HEAD_DIM
        means = Means + head_at
        variances = Variances + head_at
        rows_of_tile = tl.minimum(num_queries - first, TILE_Q)  # none, or less, where a slot holds no tile
        end = tl.where(rows_of_tile > 0, tl.cdiv(tl.maximum(offset + first + rows_of_tile, 0), BLOCK_K), 0)
        last = tl.cdiv(end, BLOCK_N) - 1
        begin = 0
        if FORM.windowed:
            begin = tl.minimum(tl.maximum(offset + first - window + 1, 0) // BLOCK_K // BLOCK_N, tl.maximum(last, 0))
        highest = tl.full((TILE_Q,), float("-inf"), tl.float32)
        running = (highest, tl.zeros((TILE_Q,), tl.float32))
        memory = _Memory(means, parts, maxima)
        reach = _Reach(position, window, end)
        scales = _Scales(unit, unit_log2, softcap_log2)
        deviation = highest
        if FORM.second:
            # A step ahead: since there is a product with them before the loops, the squares stay in registers, and
            # shared memory has room for another stage.
            deviation = _deviations(squares, variances, begin, FORM)
        masked = begin
        if not FORM.windowed:
            masked = tl.minimum(tl.maximum(offset + first + BLOCK_K, 0) // BLOCK_K, end) // BLOCK_N
            for step in range(masked):
                running = _step(step, running, q, deviation, memory, reach, scales, FORM, False)
                if FORM.second:
                    following = tl.minimum(step + 1, last)
                    deviation = _deviations(squares, variances, following, FORM)
        for step in range(masked, last + 1):
            running = _step(step, running, q, deviation, memory, reach, scales, FORM, True)
            if FORM.second:
                following = tl.minimum(step + 1, last)
                deviation = _deviations(squares, variances, following, FORM)
        highest, total = running
        tl.debug_barrier()  # threads read below what others have written
        base = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.where(real, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
        strip = tl.arange(0, STRIPS)
        rows_of_strip = tl.minimum(tl.maximum(rows_of_tile - strip * (TILE_Q // STRIPS), 1), TILE_Q // STRIPS)
        of_a_row = 1.0 / rows_of_strip.to(tl.float32)
        out = Mass + (head.to(tl.int64) * slots + slot) * STRIPS * key_tiles
        for step in range(begin, last + 1, CHUNK):
            # Beyond the last step nothing was written: the last one is read again, and stored nowhere.
            several = tl.minimum(step + tl.arange(0, CHUNK), last) * TILE_Q
            factor = tl.exp2(tl.load(maxima + several[:, None] + offs_m[None, :]) - base[None, :]) * share[None, :]
            places = (several * TILES)[:, None] + tl.arange(0, TILES)[None, :] * TILE_Q
            weights = tl.load(parts + places[:, :, None] + offs_m[None, None, :]).to(tl.float32) * factor[:, None, :]
            if FORM.second:
                weights *= weights
            sums = tl.sum(tl.reshape(weights, (CHUNK, TILES, STRIPS, TILE_Q // STRIPS)), 3)
            tile = tl.arange(0, CHUNK)[:, None] * TILES + tl.arange(0, TILES)[None, :] + step * TILES
            places = strip[None, None, :] * key_tiles + tile[:, :, None]
            tl.store(out + places, sums * of_a_row[None, None, :], mask=(tile * PER < end)[:, :, None])
        tl.debug_barrier()  # and write in the next turn where others are reading
