"""The pooled estimates in Triton: the mean of each block of keys, and for the second-order one their variance; then
each query's softmax over the blocks.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.portable.arguments import logit_scales, padded, page_strides
from longreach_kernels.portable.config import Config, capability, launch
from longreach_kernels.portable.primitives import find_sequence, load_rows, logits_log2, tile_pointers

from . import specification
from .query_tiles import QueryTiles
from .specification import Logits
from .targets import PARTS


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
    """Grid (blocks, Hkv, B): Means and, if SECOND, Variances (B, Hkv, blocks, D), of the keys that a block has."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    num_keys = tl.load(ContextLens + seq)
    if block * BLOCK_K >= num_keys:
        return
    offs_n = tl.arange(0, BLOCK_K)
    offs_d = tl.arange(0, BLOCK_D)
    base = K + head.to(tl.int64) * k_strides[1]
    table = Table + seq.to(tl.int64) * stride_table
    pointers = tile_pointers(base, table, block, offs_n, offs_d, num_keys, k_strides, BLOCK_K, PAGE_SIZE)
    keys = load_rows(pointers, block * BLOCK_K + offs_n, offs_d, num_keys, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    count = tl.minimum(num_keys - block * BLOCK_K, BLOCK_K)
    mean = tl.sum(keys, 0) / count.to(tl.float32)
    at = ((seq.to(tl.int64) * tl.num_programs(1) + head) * blocks + block) * HEAD_DIM + offs_d
    tl.store(Means + at, mean.to(Means.dtype.element_ty), mask=offs_d < HEAD_DIM)
    if SECOND:
        apart = tl.where((offs_n < count)[:, None], keys - mean[None, :], 0.0)
        variance = tl.sum(apart * apart, 0) / count.to(tl.float32)
        tl.store(Variances + at, variance.to(Variances.dtype.element_ty), mask=offs_d < HEAD_DIM)


@triton.jit
def _logits(
    q,
    squares,
    means,
    variances,
    step,
    position,
    window,
    end,
    scale,
    scale_log2,
    softcap_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SECOND: tl.constexpr,
    FROZEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits of the queries against BLOCK_N blocks, -inf where a block is not seen."""
    block = step * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    inside = (block < end)[:, None] & (offs_d[None, :] < HEAD_DIM)
    at = block[:, None] * HEAD_DIM + offs_d[None, :]
    mean = tl.load(means + at, mask=inside, other=0.0)
    products = tl.dot(q, tl.trans(mean), input_precision=PRECISION)
    if SECOND:
        variance = tl.dot(squares, tl.trans(tl.load(variances + at, mask=inside, other=0.0)), input_precision=PRECISION)
        deviation = tl.sqrt(tl.maximum(variance, 0.0)) * scale
        excess = tl.where(deviation < FROZEN, deviation * deviation, FROZEN * (2.0 * deviation - FROZEN))
        products += excess * (0.5 / scale)
    logits = logits_log2(products, scale_log2, softcap_log2, SOFTCAP)
    allowed = (block * BLOCK_K)[None, :] <= position[:, None]
    if WINDOWED:
        allowed = allowed & ((block * BLOCK_K + BLOCK_K)[None, :] > (position - window + 1)[:, None])
    return tl.where(allowed & (block < end)[None, :], logits, float("-inf"))


@triton.jit(
    do_not_specialize=["num_seqs", "window", "slots", "key_tiles", "blocks"],
    do_not_specialize_on_alignment=["CuQ", "ContextLens"],
)
def pooled_kernel(
    Q,
    Means,
    Variances,
    KScale,
    Mass,
    CuQ,
    ContextLens,
    stride_qt,
    stride_qh,
    num_seqs,
    window,
    slots,
    key_tiles,
    blocks,
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
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SECOND: tl.constexpr,
    FROZEN: tl.constexpr,
    KV_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (slots, Hq): Mass (Hq, slots, key_tiles) fp32, the mean over the queries of a tile, of squares if SECOND.
    Logits are computed twice, once for each row's sum, once for its shares: they cost less than to keep them would."""
    slot = tl.program_id(0)
    head = tl.program_id(1)
    seq, first_slot = find_sequence(CuQ, num_seqs, slot, TILE_Q)
    q_start = tl.load(CuQ + seq)
    num_queries = tl.load(CuQ + seq + 1) - q_start
    first = (slot - first_slot) * TILE_Q
    if first >= num_queries:
        return
    rows = first + tl.arange(0, TILE_Q)
    offs_d = tl.arange(0, BLOCK_D)
    real = rows < num_queries
    q_ptrs = Q + (q_start + rows).to(tl.int64)[:, None] * stride_qt + head * stride_qh + offs_d[None, :]
    q = tl.load(q_ptrs, mask=real[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)
    squares = q
    if SECOND:
        squares = (q.to(tl.float32) * q.to(tl.float32)).to(Variances.dtype.element_ty)
    kv_head = head // GROUP
    if KV_SCALES:
        scale *= tl.load(KScale + kv_head)
        scale_log2 *= tl.load(KScale + kv_head)
    offset = tl.load(ContextLens + seq) - num_queries
    position = offset + rows
    head_at = (seq.to(tl.int64) * (tl.num_programs(1) // GROUP) + kv_head) * blocks * HEAD_DIM
    means = Means + head_at
    variances = Variances + head_at
    end = tl.cdiv(tl.maximum(offset + tl.minimum(first + TILE_Q, num_queries), 0), BLOCK_K)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(offset + first - window + 1, 0) // BLOCK_K // BLOCK_N
    PER: tl.constexpr = TILE_K // BLOCK_K
    highest = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    for step in range(begin, tl.cdiv(end, BLOCK_N)):
        # fmt: off
        logits = _logits(
            q, squares, means, variances, step, position, window, end, scale, scale_log2, softcap_log2, HEAD_DIM,
            BLOCK_D, BLOCK_N, BLOCK_K, WINDOWED, SOFTCAP, SECOND, FROZEN, PRECISION,
        )
        # fmt: on
        higher = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
        highest = higher
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.where(real, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    rows_of_tile = tl.sum(real.to(tl.float32), 0)
    for step in range(begin, tl.cdiv(end, BLOCK_N)):
        # fmt: off
        logits = _logits(
            q, squares, means, variances, step, position, window, end, scale, scale_log2, softcap_log2, HEAD_DIM,
            BLOCK_D, BLOCK_N, BLOCK_K, WINDOWED, SOFTCAP, SECOND, FROZEN, PRECISION,
        )
        # fmt: on
        weights = tl.exp2(logits - base[:, None]) * share[:, None]
        if SECOND:
            weights = tl.sum(tl.reshape(weights, (TILE_Q, BLOCK_N // PER, PER)), 2)
            weights = weights * weights
        mass = tl.sum(weights, 0) / rows_of_tile
        tile = step * (BLOCK_N // PER) + tl.arange(0, BLOCK_N // PER)
        at = Mass + (head.to(tl.int64) * slots + slot) * key_tiles + tile
        tl.store(at, mass, mask=tile * PER < end)


def pooled_config(head_dim: int, dtype: torch.dtype, arch: int, tile_q: int, second: bool) -> Config:
    """Queries of a tile, blocks of a step. At D=256 on sm_90 the queries, their squares and two stages of the means and
    variances of 32 blocks take 192 KB."""
    warps = 8 if tile_q >= 128 else 4
    if arch == 0:
        return Config(tile_q, 16, warps, 1)
    if second and head_dim > 128 and not 90 <= arch < 120:
        return Config(tile_q, 16, warps, 1)
    narrow = dtype == torch.float32 or (second and (head_dim > 128 or not 90 <= arch < 120))
    return Config(tile_q, 32 if narrow else 64, warps, 2)


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
    blocks = key_tiles * (tiles.tile_k // block_k)
    config = pooled_config(head_dim, q.dtype, capability(q.device), tiles.tile_q, second)
    means = torch.empty((batch.size, kv_heads, blocks, head_dim), dtype=q.dtype, device=q.device)
    variances = means.new_empty(means.shape, dtype=specification.squares_dtype(q.dtype)) if second else means
    mass = torch.zeros((heads, slots, key_tiles), dtype=torch.float32, device=q.device)
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
        (slots, heads),
        q,
        means,
        variances,
        logits.k_scale,
        mass,
        batch.cu_seqlens_q,
        batch.context_lens,
        q.stride(0),
        q.stride(1),
        batch.size,
        tiles.window or 0,
        slots,
        key_tiles,
        blocks,
        logits.scale,
        *logit_scales(logits.scale, logits.softcap),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        BLOCK_N=config.block_n,
        TILE_Q=tiles.tile_q,
        TILE_K=tiles.tile_k,
        BLOCK_K=block_k,
        WINDOWED=tiles.window is not None,
        SOFTCAP=logits.softcap is not None,
        SECOND=second,
        FROZEN=math.sqrt(2 * math.log(block_k)),
        KV_SCALES=logits.k_scale is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **config.options(),
    )
    by_group = mass.unflatten(0, (kv_heads, -1)).mean(1)
    if second:
        by_group = by_group.sqrt()
    return (by_group.double() * PARTS).round().int()
