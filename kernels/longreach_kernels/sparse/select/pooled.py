"""The pooled estimates in Triton: the mean of each block of keys, and for the second-order one their variance; then
each query's softmax over the blocks, in one pass over the products.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.arguments import logit_scales, padded, page_strides
from longreach_kernels.backends.triton.config import Config, capability, cdiv, launch, processors
from longreach_kernels.backends.triton.primitives import find_sequence, load_rows, logits_log2, tile_pointers
from longreach_kernels.batch import PagedBatch
from longreach_kernels.sparse.select import estimators
from longreach_kernels.sparse.select import reference as specification
from longreach_kernels.sparse.select.query_tiles import QueryTiles
from longreach_kernels.sparse.select.reference import Logits
from longreach_kernels.sparse.select.targets import PARTS

# Programs for each processor of the device.
_PROGRAMS = 2

# Log2 of a factor of the sums of exponentials: in half precision at most 8 blocks of a tile stay below 2^16, and what
# is more than 2^-26 of the maximum keeps its precision.
_HEADROOM: tl.constexpr = tl.constexpr(12.0)
_SPREAD: tl.constexpr = tl.constexpr(estimators.SPREAD)


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
def _of_step(base, step, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_N, BLOCK_D): means or variances of the blocks of a step."""
    block = step * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    return load_rows(base + block[:, None] * HEAD_DIM + offs_d[None, :], block, offs_d, 0, HEAD_DIM, BLOCK_D, False)


@triton.jit
def _deviations(
    squares,
    variances,
    step,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of the products of the queries with the keys of a block, for the blocks of a step."""
    variance = _of_step(variances, step, HEAD_DIM, BLOCK_D, BLOCK_N)
    # Squares times variances are never negative, nor are their sums.
    return tl.sqrt(tl.dot(squares, tl.trans(variance), input_precision=PRECISION))


@triton.jit
def _step(
    step,
    q,
    deviation,
    means,
    parts,
    maxima,
    highest,
    total,
    position,
    window,
    end,
    scale,
    scale_log2,
    softcap_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PER: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SECOND: tl.constexpr,
    FROZEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The queries against BLOCK_N blocks: their new maximum and sum. ``parts`` is given the sum of exponentials for
    each key tile, ``maxima`` what they are relative to. Not MASKED: all queries see all of the blocks."""
    TILES: tl.constexpr = BLOCK_N // PER
    mean = _of_step(means, step, HEAD_DIM, BLOCK_D, BLOCK_N)
    logits = tl.dot(q, tl.trans(mean), input_precision=PRECISION)
    if SECOND:
        # The excess of a deviation d is m (d - m / 2), where m is the lesser of d and the limit; these here are over
        # the scale, as the products are.
        least = tl.minimum(deviation, FROZEN / scale)
        logits += least * (deviation * scale - least * (0.5 * scale))
    if SOFTCAP:
        logits = logits_log2(logits, scale_log2, softcap_log2, True)
        scale_log2 = 1.0
    if MASKED:
        block = step * BLOCK_N + tl.arange(0, BLOCK_N)
        allowed = (block * BLOCK_K)[None, :] <= position[:, None]
        if WINDOWED:
            allowed = allowed & ((block * BLOCK_K + BLOCK_K)[None, :] > (position - window + 1)[:, None])
        logits = tl.where(allowed & (block < end)[None, :], logits, float("-inf"))
    higher = tl.maximum(highest, tl.max(logits, 1) * scale_log2)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits * scale_log2 - (base - _HEADROOM)[:, None])
    sums = tl.sum(tl.reshape(weights, (TILE_Q, TILES, PER)), 2)
    total = total * tl.exp2(highest - base) + tl.sum(sums, 1)
    rows = tl.arange(0, TILE_Q)
    places = (step * TILES + tl.arange(0, TILES))[None, :] * TILE_Q + rows[:, None]
    tl.store(parts + places, sums.to(parts.dtype.element_ty))
    tl.store(maxima + step * TILE_Q + rows, higher)
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIPS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SECOND: tl.constexpr,
    FROZEN: tl.constexpr,
    KV_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (programs,): Mass (Hq, slots, STRIPS, key_tiles) fp32, the mean over the queries of a strip of a tile, of
    squares if SECOND.

    A program goes from item to item, each a slot and a head, and computes the logits of each once. What it keeps of
    them lies in the L2 cache: for each query and key tile the sum of exponentials, in Parts (programs, steps, tiles of
    a step, TILE_Q), relative to the maximum that the query had come to, in Maxima (programs, steps, TILE_Q) fp32. With
    the query's sum over all of its blocks they become shares.
    """
    PER: tl.constexpr = TILE_K // BLOCK_K
    TILES: tl.constexpr = BLOCK_N // PER
    CHUNK: tl.constexpr = 64 // TILES  # steps that become shares together, so that no load waits for another
    tl.static_assert(PER <= 8)
    program = tl.program_id(0)
    parts = Parts + program.to(tl.int64) * steps * (TILES * TILE_Q)
    maxima = Maxima + program.to(tl.int64) * steps * TILE_Q
    offs_m = tl.arange(0, TILE_Q)
    offs_d = tl.arange(0, BLOCK_D)
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
        if SECOND:
            squares = (q.to(tl.float32) * q.to(tl.float32)).to(Variances.dtype.element_ty)
        kv_head = head // GROUP
        unit = scale
        unit_log2 = scale_log2
        if KV_SCALES:
            k_scale = tl.load(KScale + kv_head)
            unit = scale * k_scale
            unit_log2 = scale_log2 * k_scale
        offset = tl.load(ContextLens + seq) - num_queries
        position = offset + rows
        head_at = (seq.to(tl.int64) * (heads // GROUP) + kv_head) * blocks * HEAD_DIM
        means = Means + head_at
        variances = Variances + head_at
        rows_of_tile = tl.minimum(num_queries - first, TILE_Q)  # none, or less, where a slot holds no tile
        end = tl.where(rows_of_tile > 0, tl.cdiv(tl.maximum(offset + first + rows_of_tile, 0), BLOCK_K), 0)
        last = tl.cdiv(end, BLOCK_N) - 1
        begin = 0
        if WINDOWED:
            begin = tl.minimum(tl.maximum(offset + first - window + 1, 0) // BLOCK_K // BLOCK_N, tl.maximum(last, 0))
        highest = tl.full((TILE_Q,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_Q,), tl.float32)
        deviation = highest
        if SECOND:
            # A step ahead: since there is a product with them before the loops, the squares stay in registers, and
            # shared memory has room for another stage.
            deviation = _deviations(squares, variances, begin, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION)
        masked = begin
        if not WINDOWED:
            masked = tl.minimum(tl.maximum(offset + first + BLOCK_K, 0) // BLOCK_K, end) // BLOCK_N
            for step in range(masked):
                # fmt: off
                highest, total = _step(
                    step, q, deviation, means, parts, maxima, highest, total, position, window, end, unit, unit_log2,
                    softcap_log2, HEAD_DIM, BLOCK_D, BLOCK_N, TILE_Q, BLOCK_K, PER, False, WINDOWED, SOFTCAP, SECOND,
                    FROZEN, PRECISION,
                )
                # fmt: on
                if SECOND:
                    following = tl.minimum(step + 1, last)
                    deviation = _deviations(squares, variances, following, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION)
        for step in range(masked, last + 1):
            # fmt: off
            highest, total = _step(
                step, q, deviation, means, parts, maxima, highest, total, position, window, end, unit, unit_log2,
                softcap_log2, HEAD_DIM, BLOCK_D, BLOCK_N, TILE_Q, BLOCK_K, PER, True, WINDOWED, SOFTCAP, SECOND,
                FROZEN, PRECISION,
            )
            # fmt: on
            if SECOND:
                following = tl.minimum(step + 1, last)
                deviation = _deviations(squares, variances, following, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION)
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
            if SECOND:
                weights *= weights
            sums = tl.sum(tl.reshape(weights, (CHUNK, TILES, STRIPS, TILE_Q // STRIPS)), 3)
            tile = tl.arange(0, CHUNK)[:, None] * TILES + tl.arange(0, TILES)[None, :] + step * TILES
            places = strip[None, None, :] * key_tiles + tile[:, :, None]
            tl.store(out + places, sums * of_a_row[None, None, :], mask=(tile * PER < end)[:, :, None])
        tl.debug_barrier()  # and write in the next turn where others are reading


def pooled_config(head_dim: int, dtype: torch.dtype, arch: int, tile_q: int, second: bool) -> Config:
    """Queries of a tile, blocks of a step.

    On sm_90 two programs share a processor up to D=128, so that one computes exponentials while the other multiplies:
    113 KB and 128 registers a thread for each. At D=128 the queries and three stages of the means and variances of 32
    blocks take 84 KB with what goes through shared memory on its way to the cache. At D=256 there is one program, of
    164 KB. On sm_100 three stages would take 232 KB there, of 227 KB.
    """
    warps = 8 if tile_q >= 128 else 4
    hopper = 90 <= arch < 120 and dtype != torch.float32
    if arch == 0 or (second and head_dim > 128 and not 90 <= arch < 120):
        return Config(tile_q, 16, warps, 1)
    narrow = dtype == torch.float32 or (second and (head_dim > 64 or not hopper))
    stages = 3 if hopper and not (second and head_dim > 128 and arch >= 100) else 2
    return Config(tile_q, 32 if narrow else 64, warps, stages)


def pooled_options(config: Config, head_dim: int, dtype: torch.dtype, arch: int) -> dict[str, int]:
    """What Triton's launcher takes: where two programs share a processor, each has half of its registers."""
    together = 90 <= arch < 120 and head_dim <= 128 and dtype != torch.float32 and config.num_warps == 8
    return config.options() | ({"maxnreg": 128} if together else {})


def pooled_mass(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    tiles: QueryTiles,
    logits: Logits,
    block: int | None = None,
) -> Tensor:
    """As `specification.pooled_mass`, or with a ``block`` `specification.moments_mass`, for a whole batch in two
    launches. Does not wait for the device.

    Means and variances are made of the pages each time: reading the keys once costs little beside attention to them.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    slots, key_tiles = len(tiles.seq), tiles.key_tiles
    second, block_k = block is not None, block or tiles.tile_k
    per_tile = tiles.tile_k // block_k
    arch = capability(q.device)
    config = pooled_config(head_dim, q.dtype, arch, tiles.tile_q, second)
    steps = cdiv(key_tiles * per_tile, config.block_n)
    blocks = steps * config.block_n  # of whole steps, so that no load needs a mask for rows
    means = torch.empty((batch.size, kv_heads, blocks, head_dim), dtype=q.dtype, device=q.device)
    variances = means.new_empty(means.shape, dtype=specification.squares_dtype(q.dtype)) if second else means
    programs = min(slots * heads, _PROGRAMS * processors(q.device))
    sums = torch.float32 if q.dtype == torch.float32 else torch.float16
    parts = means.new_empty((programs, steps, config.block_n // per_tile, tiles.tile_q), dtype=sums)
    maxima = means.new_empty((programs, steps, tiles.tile_q), dtype=torch.float32)
    strips = estimators.strips_of(tiles.tile_q) if second else 1
    mass = torch.zeros((heads, slots, strips, key_tiles), dtype=torch.float32, device=q.device)
    launch(
        moments_kernel,
        (blocks, kv_heads, batch.size),
        k_pages,
        means,
        variances,
        batch.context_lens,
        batch.page_table,
        page_strides(k_pages),
        batch.page_table.stride(0),
        blocks,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        BLOCK_K=block_k,
        PAGE_SIZE=page_size,
        SECOND=second,
        num_warps=4,
    )
    launch(
        pooled_kernel,
        (programs,),
        q,
        means,
        variances,
        logits.k_scale,
        parts,
        maxima,
        mass,
        batch.cu_seqlens_q,
        batch.context_lens,
        q.stride(0),
        q.stride(1),
        batch.size,
        tiles.window or 0,
        slots,
        heads,
        key_tiles,
        blocks,
        steps,
        logits.scale,
        *logit_scales(logits.scale, logits.softcap),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        BLOCK_N=config.block_n,
        TILE_Q=tiles.tile_q,
        TILE_K=tiles.tile_k,
        BLOCK_K=block_k,
        STRIPS=strips,
        WINDOWED=tiles.window is not None,
        SOFTCAP=logits.softcap is not None,
        SECOND=second,
        FROZEN=math.sqrt(2 * math.log(block_k)),
        KV_SCALES=logits.k_scale is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **pooled_options(config, head_dim, q.dtype, arch),
    )
    by_group = mass.unflatten(0, (kv_heads, -1)).mean(1)
    if second:
        by_group = by_group.sqrt()
    return (by_group.double() * PARTS).round().int()
