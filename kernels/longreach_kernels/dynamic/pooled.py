"""The pooled estimate in Triton: the mean key of each tile, then each query's softmax over the means."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.portable.arguments import logit_scales, padded, page_strides
from longreach_kernels.portable.config import capability, launch
from longreach_kernels.portable.primitives import find_sequence, load_rows, logits_log2, tile_pointers

from .query_tiles import QueryTiles
from .specification import Logits
from .targets import PARTS


@triton.jit(
    do_not_specialize=["stride_table", "key_tiles"],
    do_not_specialize_on_alignment=["ContextLens", "Table"],
)
def mean_kernel(
    K,
    Means,
    ContextLens,
    Table,
    k_strides,
    stride_table,
    key_tiles,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Grid (key tiles, Hkv, B): Means (B, Hkv, key_tiles, D), of the keys that a tile has."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    num_keys = tl.load(ContextLens + seq)
    if tile * TILE_K >= num_keys:
        return
    offs_n = tl.arange(0, TILE_K)
    offs_d = tl.arange(0, BLOCK_D)
    base = K + head.to(tl.int64) * k_strides[1]
    table = Table + seq.to(tl.int64) * stride_table
    pointers = tile_pointers(base, table, tile, offs_n, offs_d, num_keys, k_strides, TILE_K, PAGE_SIZE)
    keys = load_rows(pointers, tile * TILE_K + offs_n, offs_d, num_keys, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    mean = tl.sum(keys, 0) / tl.minimum(num_keys - tile * TILE_K, TILE_K).to(tl.float32)
    row = (seq.to(tl.int64) * tl.num_programs(1) + head) * key_tiles + tile
    tl.store(Means + row * HEAD_DIM + offs_d, mean.to(Means.dtype.element_ty), mask=offs_d < HEAD_DIM)


@triton.jit
def _logits(
    q,
    means,
    block,
    position,
    window,
    key_tiles,
    end,
    scale_log2,
    softcap_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_K: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits of the queries against a block of means, -inf where the tile is not seen."""
    tile = block * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    inside = (tile < end)[:, None] & (offs_d[None, :] < HEAD_DIM)
    mean = tl.load(means + tile[:, None] * HEAD_DIM + offs_d[None, :], mask=inside, other=0.0)
    products = tl.dot(q, tl.trans(mean), input_precision=PRECISION)
    logits = logits_log2(products, scale_log2, softcap_log2, SOFTCAP)
    allowed = (tile * TILE_K)[None, :] <= position[:, None]
    if WINDOWED:
        allowed = allowed & ((tile * TILE_K + TILE_K)[None, :] > (position - window + 1)[:, None])
    return tl.where(allowed & (tile < end)[None, :], logits, float("-inf"))


@triton.jit(
    do_not_specialize=["num_seqs", "window", "slots", "key_tiles"],
    do_not_specialize_on_alignment=["CuQ", "ContextLens"],
)
def pooled_kernel(
    Q,
    Means,
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
    scale_log2,
    softcap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (slots, Hq): Mass (Hq, slots, key_tiles) fp32, the mean over the queries of a tile. Logits are computed
    twice, once for each row's sum, once for its shares: they cost less than to keep them would."""
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
    kv_head = head // GROUP
    if KV_SCALES:
        scale_log2 *= tl.load(KScale + kv_head)
    offset = tl.load(ContextLens + seq) - num_queries
    position = offset + rows
    means = Means + (seq.to(tl.int64) * (tl.num_programs(1) // GROUP) + kv_head) * key_tiles * HEAD_DIM
    end = tl.cdiv(tl.maximum(offset + tl.minimum(first + TILE_Q, num_queries), 0), TILE_K)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(offset + first - window + 1, 0) // TILE_K // BLOCK_N
    highest = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    for block in range(begin, tl.cdiv(end, BLOCK_N)):
        # fmt: off
        logits = _logits(
            q, means, block, position, window, key_tiles, end, scale_log2, softcap_log2, HEAD_DIM, BLOCK_D, BLOCK_N,
            TILE_K, WINDOWED, SOFTCAP, PRECISION,
        )
        # fmt: on
        higher = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
        highest = higher
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.where(real, 1.0 / (tl.where(total > 0.0, total, 1.0) * tl.sum(real.to(tl.float32), 0)), 0.0)
    for block in range(begin, tl.cdiv(end, BLOCK_N)):
        # fmt: off
        logits = _logits(
            q, means, block, position, window, key_tiles, end, scale_log2, softcap_log2, HEAD_DIM, BLOCK_D, BLOCK_N,
            TILE_K, WINDOWED, SOFTCAP, PRECISION,
        )
        # fmt: on
        mass = tl.sum(tl.exp2(logits - base[:, None]) * share[:, None], 0)
        tile = block * BLOCK_N + tl.arange(0, BLOCK_N)
        at = Mass + (head.to(tl.int64) * slots + slot) * key_tiles + tile
        tl.store(at, mass, mask=tile < end)


def pooled_mass(q: Tensor, k_pages: Tensor, batch: PagedBatch, tiles: QueryTiles, logits: Logits) -> Tensor:
    """As `specification.pooled_mass`, for a whole batch in two launches. Does not wait for the device.

    The means are made of the pages each time: reading the keys once costs little beside attention to them.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    slots, key_tiles = len(tiles.seq), tiles.key_tiles
    means = torch.empty((batch.size, kv_heads, key_tiles, head_dim), dtype=q.dtype, device=q.device)
    mass = torch.zeros((heads, slots, key_tiles), dtype=torch.float32, device=q.device)
    launch(
        mean_kernel,
        (key_tiles, kv_heads, batch.size),
        k_pages,
        means,
        batch.context_lens,
        batch.page_table,
        page_strides(k_pages),
        batch.page_table.stride(0),
        key_tiles,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        TILE_K=tiles.tile_k,
        PAGE_SIZE=page_size,
        num_warps=4,
    )
    launch(
        pooled_kernel,
        (slots, heads),
        q,
        means,
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
        *logit_scales(logits.scale, logits.softcap),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        BLOCK_N=16 if capability(q.device) == 0 else 32 if q.dtype == torch.float32 else 64,
        TILE_Q=tiles.tile_q,
        TILE_K=tiles.tile_k,
        WINDOWED=tiles.window is not None,
        SOFTCAP=logits.softcap is not None,
        KV_SCALES=logits.k_scale is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8 if tiles.tile_q >= 128 else 4,
        num_stages=2,
    )
    by_group = mass.unflatten(0, (kv_heads, -1)).mean(1)
    return (by_group.double() * PARTS).round().int()
