"""Where the attention of a few queries of each query tile lies: the log-sum-exp of their logits in every key tile.

It is exact, and costs the products of those queries with the keys alone: no values are read.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.arguments import logit_scales, padded, page_strides
from longreach_kernels.backends.triton.config import TileConfig, capability, cdiv, launch, processors
from longreach_kernels.backends.triton.primitives import load_rows, logits_log2, tile_pointers
from longreach_kernels.batch import PagedBatch
from longreach_kernels.sparse.select.query_tiles import QueryTiles
from longreach_kernels.sparse.select.reference import Logits

# Programs for each processor of the device, at least.
_PROGRAMS = 4


class RowForm(NamedTuple):
    """What `row_masses_kernel` is compiled for.

    Attributes:
        group: query heads of a KV head.
        head_dim, block_d: channels, and the power of two that they are padded to.
        block_m: rows of a program, each a query and a head.
        tile_k: keys of a tile.
        page_size: tokens of a page.
        softcap, kv_scales: whether there are any.
        precision: of fp32 products.
    """

    group: int
    head_dim: int
    block_d: int
    block_m: int
    tile_k: int
    page_size: int
    softcap: bool
    kv_scales: bool
    precision: str


@triton.jit(
    do_not_specialize=["count", "splits", "stride_table"],
    do_not_specialize_on_alignment=["Row", "Position", "Seq", "Table"],
)
def row_masses_kernel(
    Q,
    K,
    KScale,
    Row,
    Position,
    Seq,
    Table,
    Out,
    stride_qt,
    stride_qh,
    k_strides,
    stride_table,
    count,
    splits,
    scale_log2,
    softcap_log2,
    FORM: tl.constexpr,
):
    """Grid (blocks of rows, Hkv, splits of the keys): Out (key tiles, Hkv, count, GROUP) fp32, the log-sum-exp in log2
    units of each key tile that a row sees; others are not written. A Row below 0 is none."""
    BLOCK_M: tl.constexpr = FORM.block_m
    TILE_K: tl.constexpr = FORM.tile_k
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    entry = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    index = entry // FORM.group
    inside = index < count
    row = tl.load(Row + index, mask=inside, other=-1)
    position = tl.load(Position + index, mask=inside, other=-1)
    seq = tl.load(Seq + index, mask=inside, other=0)
    real = row >= 0
    offs_d = tl.arange(0, FORM.block_d)
    offs_n = tl.arange(0, TILE_K)
    head = kv_head * FORM.group + entry % FORM.group
    pointers = Q + row.to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :]
    q = tl.load(pointers, mask=real[:, None] & (offs_d[None, :] < FORM.head_dim), other=0.0)
    unit_log2 = scale_log2
    if FORM.kv_scales:
        unit_log2 = scale_log2 * tl.load(KScale + kv_head)
    base = K + kv_head.to(tl.int64) * k_strides[1]
    out = Out + kv_head.to(tl.int64) * count * FORM.group + entry
    stride_out = tl.num_programs(1).to(tl.int64) * count * FORM.group
    # A block has rows of one sequence, or of few that follow each other.
    first_seq = tl.min(tl.where(real, seq, 1 << 30), 0)
    last_seq = tl.max(tl.where(real, seq, -1), 0)
    for one in range(first_seq, last_seq + 1):
        mine = real & (seq == one)
        reach = tl.where(mine, position, -1)
        num_keys = tl.max(reach, 0) + 1
        tiles = tl.cdiv(num_keys, TILE_K)
        per = tl.cdiv(tiles, splits)
        table = Table + (tl.zeros((), tl.int64) + one) * stride_table
        for tile in range(split * per, tl.minimum((split + 1) * per, tiles)):
            keys = tile * TILE_K + offs_n
            k_at = tile_pointers(base, table, tile, offs_n, offs_d, num_keys, k_strides, TILE_K, FORM.page_size)
            k = load_rows(k_at, keys, offs_d, num_keys, FORM.head_dim, FORM.block_d, True).to(q.dtype)
            logits = tl.dot(q, tl.trans(k), input_precision=FORM.precision)
            logits = logits_log2(logits, unit_log2, softcap_log2, FORM.softcap)
            logits = tl.where(keys[None, :] <= reach[:, None], logits, float("-inf"))
            highest = tl.max(logits, 1)
            least = tl.where(highest == float("-inf"), 0.0, highest)
            total = tl.sum(tl.exp2(logits - least[:, None]), 1)
            tl.store(out + tile * stride_out, least + tl.log2(total), mask=mine & (highest > float("-inf")))


def row_config(head_dim: int, dtype: torch.dtype, arch: int, tile_k: int) -> TileConfig:
    """Rows of a program and keys of a step, which is a key tile."""
    if arch == 0:
        return TileConfig(16, tile_k, 4, 1)
    if dtype == torch.float32 or head_dim > 256:
        return TileConfig(32, tile_k, 4, 1)
    if arch >= 90 and arch < 120:
        return TileConfig(128, tile_k, 8, 3 if head_dim <= 128 else 2)
    return TileConfig(64, tile_k, 4, 2 if head_dim <= 128 else 1)


def row_masses(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    tiles: QueryTiles,
    rows: tuple[Tensor, Tensor, Tensor],
    logits: Logits,
) -> Tensor:
    """As `reference.row_masses`. Does not wait for the device."""
    heads, head_dim = q.shape[1], q.shape[2]
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    group, count = heads // kv_heads, rows[0].numel()
    config = row_config(head_dim, q.dtype, capability(q.device), tiles.tile_k)
    blocks = cdiv(count * group, config.block_m)
    splits = min(tiles.key_tiles, cdiv(_PROGRAMS * processors(q.device), blocks * kv_heads))
    out = torch.full((tiles.key_tiles, kv_heads, count, group), float("-inf"), device=q.device)
    launch(
        row_masses_kernel,
        (blocks, kv_heads, splits),
        q,
        k_pages,
        logits.k_scale,
        *rows,
        batch.page_table,
        out,
        q.stride(0),
        q.stride(1),
        page_strides(k_pages),
        batch.page_table.stride(0),
        count,
        splits,
        *logit_scales(logits.scale, logits.softcap),
        FORM=RowForm(
            group=group,
            head_dim=head_dim,
            block_d=padded(head_dim),
            block_m=config.block_m,
            tile_k=tiles.tile_k,
            page_size=page_size,
            softcap=logits.softcap is not None,
            kv_scales=logits.k_scale is not None,
            precision="ieee" if q.dtype == torch.float32 else "tf32",
        ),
        **config.options(),
    )
    return out
