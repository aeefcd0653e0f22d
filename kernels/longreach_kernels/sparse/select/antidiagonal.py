"""The antidiagonal estimate in Triton: products of folded queries and keys, then their mass by key tile.

The first kernel computes a block of products, its own maximum for each row and, relative to it, the sum of each key
tile; the second joins the blocks of a row. So the products are computed once, and no block waits for another.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.arguments import logit_scales, padded, page_strides
from longreach_kernels.backends.triton.config import TileConfig, capability, cdiv, launch
from longreach_kernels.backends.triton.primitives import find_sequence, logits_log2
from longreach_kernels.batch import PagedBatch
from longreach_kernels.sparse.select.query_tiles import QueryTiles
from longreach_kernels.sparse.select.reference import Logits
from longreach_kernels.sparse.select.targets import PARTS

# Channels of a product: the loads of smaller ones can be further ahead of it.
_CHUNK = 64


@triton.jit(
    do_not_specialize=["stride_table", "num_seqs", "window", "slots", "key_tiles", "key_blocks"],
    do_not_specialize_on_alignment=["CuQ", "ContextLens", "Table"],
)
def folded_kernel(
    Q,
    K,
    KScale,
    Sums,
    Maxima,
    CuQ,
    ContextLens,
    Table,
    stride_qt,
    stride_qh,
    k_strides,
    stride_table,
    num_seqs,
    window,
    slots,
    key_tiles,
    key_blocks,
    scale_log2,
    softcap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    FOLD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (GROUP * blocks of queries, blocks of keys, Hkv), so that programs side by side share their keys. Their
    products are summed over CHUNKS of BLOCK_D channels.

    Writes Sums (Hq, slots, TILE_Q // FOLD, key_tiles) and Maxima (Hq, slots, TILE_Q // FOLD, key_blocks), log2 units.
    """
    kv_head = tl.program_id(2)
    head = kv_head * GROUP + tl.program_id(0) % GROUP
    seq, first_block = find_sequence(CuQ, num_seqs, tl.program_id(0) // GROUP, BLOCK_M * FOLD)
    q_start = tl.load(CuQ + seq)
    num_queries = tl.load(CuQ + seq + 1) - q_start
    num_keys = tl.load(ContextLens + seq)
    row0 = (tl.program_id(0) // GROUP - first_block) * BLOCK_M
    column0 = tl.program_id(1) * BLOCK_N
    offset = num_keys - num_queries
    if row0 * FOLD >= num_queries:
        return
    if column0 * FOLD >= offset + tl.minimum((row0 + BLOCK_M) * FOLD, num_queries):
        return
    if WINDOWED:  # noqa: SIM102 (one is known to the compiler)
        if (column0 + BLOCK_N) * FOLD <= offset + row0 * FOLD - window + 1:
            return

    rows = row0 + tl.arange(0, BLOCK_M)
    columns = column0 + tl.arange(0, BLOCK_N)
    q_base = Q + q_start.to(tl.int64) * stride_qt + head * stride_qh
    k_base = K + kv_head.to(tl.int64) * k_strides[1]
    table = Table + seq.to(tl.int64) * stride_table
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PAGE_SIZE % FOLD == 0:  # the keys of a fold lie in one page
        starts = columns * FOLD
        page = tl.load(table + starts // PAGE_SIZE, mask=starts < num_keys, other=0).to(tl.int64)
        folds = page * k_strides[0] + starts % PAGE_SIZE * k_strides[2]
    for step in range(FOLD * CHUNKS):
        i = step // CHUNKS
        offs_d = step % CHUNKS * BLOCK_D + tl.arange(0, BLOCK_D)
        channels = offs_d[None, :] < HEAD_DIM
        query = rows * FOLD + FOLD - 1 - i
        q_ptrs = q_base + query.to(tl.int64)[:, None] * stride_qt + offs_d[None, :]
        q = tl.load(q_ptrs, mask=(query < num_queries)[:, None] & channels, other=0.0)
        key = columns * FOLD + i
        if PAGE_SIZE % FOLD == 0:
            k_rows = folds + i * k_strides[2]
        else:
            page = tl.load(table + key // PAGE_SIZE, mask=key < num_keys, other=0).to(tl.int64)
            k_rows = page * k_strides[0] + key % PAGE_SIZE * k_strides[2]
        k_ptrs = k_base + k_rows[:, None] + offs_d[None, :]
        k = tl.load(k_ptrs, mask=(key < num_keys)[:, None] & channels, other=0.0).to(q.dtype)
        products = tl.dot(q, tl.trans(k), products, input_precision=PRECISION)

    if KV_SCALES:
        scale_log2 *= tl.load(KScale + kv_head)
    logits = logits_log2(products, scale_log2, softcap_log2, SOFTCAP)
    position = offset + rows * FOLD
    start = columns * FOLD
    allowed = (start[None, :] <= position[:, None]) & (start < num_keys)[None, :]
    if WINDOWED:
        allowed = allowed & ((start + FOLD)[None, :] > (position - window + 1)[:, None])
    logits = tl.where(allowed, logits, float("-inf"))
    highest = tl.max(logits, 1)
    weights = tl.exp2(logits - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    TILES: tl.constexpr = BLOCK_N * FOLD // TILE_K
    sums = tl.sum(tl.reshape(weights, (BLOCK_M, TILES, TILE_K // FOLD)), 2)

    FOLDS: tl.constexpr = TILE_Q // FOLD
    slot = (q_start - tl.load(CuQ)) // TILE_Q + seq + rows // FOLDS
    place = (head.to(tl.int64) * slots + slot) * FOLDS + rows % FOLDS
    real = rows * FOLD < num_queries
    tile = column0 * FOLD // TILE_K + tl.arange(0, TILES)
    tl.store(Sums + place[:, None] * key_tiles + tile[None, :], sums, mask=real[:, None] & (tile < key_tiles)[None, :])
    tl.store(Maxima + place * key_blocks + tl.program_id(1), highest, mask=real)


@triton.jit(
    do_not_specialize=["num_seqs", "window", "slots", "key_tiles", "key_blocks"],
    do_not_specialize_on_alignment=["CuQ", "ContextLens"],
)
def join_kernel(
    Sums,
    Maxima,
    Mass,
    CuQ,
    ContextLens,
    num_seqs,
    window,
    slots,
    key_tiles,
    key_blocks,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    FOLD: tl.constexpr,
    WINDOWED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid (slots, Hkv): Mass (Hkv, slots, key_tiles) int32, the mean over the folded queries of a tile and its heads.

    ROWS: their number, rounded up to a power of two; TILES: key tiles of a block."""
    slot = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, first_slot = find_sequence(CuQ, num_seqs, slot, TILE_Q)
    num_queries = tl.load(CuQ + seq + 1) - tl.load(CuQ + seq)
    first = (slot - first_slot) * TILE_Q
    if first >= num_queries:
        return
    FOLDS: tl.constexpr = TILE_Q // FOLD
    row = tl.arange(0, ROWS)
    real = (row < GROUP * FOLDS) & (first + row % FOLDS * FOLD < num_queries)
    place = ((kv_head * GROUP + row // FOLDS).to(tl.int64) * slots + slot) * FOLDS + row % FOLDS
    tiles = tl.arange(0, TILES)
    low = tl.load(ContextLens + seq) - num_queries + first
    high = tl.load(ContextLens + seq) - num_queries + tl.minimum(first + TILE_Q, num_queries)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(low - window + 1, 0) // (TILES * TILE_K)
    end = tl.cdiv(tl.maximum(high, 0), TILES * TILE_K)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for block in range(begin, end):
        tile = block * TILES + tiles
        inside = real[:, None] & (tile < key_tiles)[None, :]
        local = tl.load(Maxima + place * key_blocks + block, mask=real, other=float("-inf"))
        sums = tl.sum(tl.load(Sums + place[:, None] * key_tiles + tile[None, :], mask=inside, other=0.0), 1)
        higher = tl.maximum(highest, local)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(highest - base) + sums * tl.exp2(local - base)
        highest = higher
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = 1.0 / (tl.where(total > 0.0, total, 1.0) * tl.sum(real.to(tl.float32), 0))
    for block in range(begin, end):
        tile = block * TILES + tiles
        inside = real[:, None] & (tile < key_tiles)[None, :]
        local = tl.load(Maxima + place * key_blocks + block, mask=real, other=float("-inf"))
        sums = tl.load(Sums + place[:, None] * key_tiles + tile[None, :], mask=inside, other=0.0)
        mass = tl.sum(sums * (tl.exp2(local - base) * share)[:, None], 0)
        at = Mass + (kv_head.to(tl.int64) * slots + slot) * key_tiles + tile
        tl.store(at, (mass * PARTS + 0.5).to(tl.int32), mask=tile < key_tiles)


def folded_config(head_dim: int, dtype: torch.dtype, arch: int, stride: int) -> TileConfig:
    """Blocks of folded queries and keys.

    Measured on an H200 at D=128, 32 heads, 128K tokens, stride 16: 128x256 with 4 stages of 64 channels (192 KB) 8.97
    ms, with 3 stages 9.31, 256x128 10.29, 128x128 10.76; with stages of 128 channels 128x128 10.97, 128x256 12.49. At
    D=64 and stride 8 the wider blocks would spill with 8-bit keys.
    """
    if arch == 0:
        return TileConfig(16, max(16, 32 // stride), 4, 1)
    if dtype == torch.float32:
        return TileConfig(32, 32, 4, 1)
    if arch >= 90 and arch < 120:
        return TileConfig(128, 128 if head_dim <= 64 and stride < 16 else 256, 8, 4)
    return TileConfig(64, 64, 4, 2) if head_dim <= 128 else TileConfig(64, 32, 4, 1)


def antidiagonal_mass(
    q: Tensor, k_pages: Tensor, batch: PagedBatch, tiles: QueryTiles, logits: Logits, stride: int
) -> Tensor:
    """As `reference.antidiagonal_mass`, for a whole batch in two launches. Does not wait for the device."""
    heads, head_dim = q.shape[1], q.shape[2]
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    group, slots, folds = heads // kv_heads, len(tiles.seq), tiles.tile_q // stride
    config = folded_config(head_dim, q.dtype, capability(q.device), stride)
    block_d = min(padded(head_dim), _CHUNK)
    tiles_of_block = config.block_n * stride // tiles.tile_k
    key_blocks = cdiv(tiles.key_tiles, tiles_of_block)
    sums = torch.empty((heads, slots, folds, tiles.key_tiles), dtype=torch.float32, device=q.device)
    maxima = torch.empty((heads, slots, folds, key_blocks), dtype=torch.float32, device=q.device)
    mass = torch.zeros((kv_heads, slots, tiles.key_tiles), dtype=torch.int32, device=q.device)
    windowed = tiles.window is not None
    launch(
        folded_kernel,
        (group * (q.shape[0] // (config.block_m * stride) + batch.size), key_blocks, kv_heads),
        q,
        k_pages,
        logits.k_scale,
        sums,
        maxima,
        batch.cu_seqlens_q,
        batch.context_lens,
        batch.page_table,
        q.stride(0),
        q.stride(1),
        page_strides(k_pages),
        batch.page_table.stride(0),
        batch.size,
        tiles.window or 0,
        slots,
        tiles.key_tiles,
        key_blocks,
        *logit_scales(logits.scale / stride, logits.softcap),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        CHUNKS=padded(head_dim) // block_d,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TILE_Q=tiles.tile_q,
        TILE_K=tiles.tile_k,
        FOLD=stride,
        PAGE_SIZE=page_size,
        WINDOWED=windowed,
        SOFTCAP=logits.softcap is not None,
        KV_SCALES=logits.k_scale is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **config.options(),
    )
    launch(
        join_kernel,
        (slots, kv_heads),
        sums,
        maxima,
        mass,
        batch.cu_seqlens_q,
        batch.context_lens,
        batch.size,
        tiles.window or 0,
        slots,
        tiles.key_tiles,
        key_blocks,
        GROUP=group,
        ROWS=triton.next_power_of_2(group * folds),
        TILES=tiles_of_block,
        TILE_Q=tiles.tile_q,
        TILE_K=tiles.tile_k,
        FOLD=stride,
        WINDOWED=windowed,
        PARTS=PARTS,
        num_warps=4,
    )
    return mass[:, :, None]
