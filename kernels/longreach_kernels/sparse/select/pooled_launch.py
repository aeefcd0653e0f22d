"""Launches of the pooled estimates: their configurations, and the memory that they keep."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longreach_kernels.backends.triton.arguments import logit_scales, padded, page_strides
from longreach_kernels.backends.triton.config import TileConfig, capability, cdiv, launch, processors
from longreach_kernels.batch import PagedBatch
from longreach_kernels.sparse.select import estimators, reference
from longreach_kernels.sparse.select.pooled import Form, moments_kernel, pooled_kernel
from longreach_kernels.sparse.select.query_tiles import QueryTiles
from longreach_kernels.sparse.select.reference import Logits
from longreach_kernels.sparse.select.targets import PARTS

# Programs for each processor of the device.
_PROGRAMS = 2


def pooled_config(head_dim: int, dtype: torch.dtype, arch: int, tile_q: int, second: bool) -> TileConfig:
    """Queries of a tile, blocks of a step.

    On sm_90 two programs share a processor up to D=128, so that one computes exponentials while the other multiplies:
    113 KB and 128 registers a thread for each. At D=128 the queries and three stages of the means and variances of 32
    blocks take 84 KB with what goes through shared memory on its way to the cache. At D=256 there is one program, of
    164 KB. On sm_100 three stages would take 232 KB there, of 227 KB. At D=512 two take
    194 KB on sm_90, and more than there is on sm_100.
    """
    warps = 8 if tile_q >= 128 else 4
    hopper = 90 <= arch < 120 and dtype != torch.float32
    if arch == 0 or (second and head_dim > 128 and not 90 <= arch < 120):
        return TileConfig(tile_q, 16, warps, 1)
    if head_dim > 256:
        fits = 90 <= arch < (100 if second else 120)
        return TileConfig(tile_q, 32, warps, 2) if fits else TileConfig(tile_q, 16, warps, 1)
    narrow = dtype == torch.float32 or (second and (head_dim > 64 or not hopper))
    stages = 3 if hopper and not (second and head_dim > 128 and arch >= 100) else 2
    return TileConfig(tile_q, 32 if narrow else 64, warps, stages)


def pooled_options(config: TileConfig, head_dim: int, dtype: torch.dtype, arch: int) -> dict[str, int]:
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
    """As `reference.pooled_mass`, or with a ``block`` `reference.moments_mass`, for a whole batch in two
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
    variances = means.new_empty(means.shape, dtype=reference.squares_dtype(q.dtype)) if second else means
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
        FORM=Form(
            group=heads // kv_heads,
            head_dim=head_dim,
            block_d=padded(head_dim),
            block_n=config.block_n,
            block_k=block_k,
            tile_q=tiles.tile_q,
            tile_k=tiles.tile_k,
            strips=strips,
            windowed=tiles.window is not None,
            softcap=logits.softcap is not None,
            kv_scales=logits.k_scale is not None,
            second=second,
            frozen=math.sqrt(2 * math.log(block_k)),
            precision="ieee" if q.dtype == torch.float32 else "tf32",
        ),
        **pooled_options(config, head_dim, q.dtype, arch),
    )
    by_group = mass.unflatten(0, (kv_heads, -1)).mean(1)
    if second:
        by_group = by_group.sqrt()
    return (by_group.double() * PARTS).round().int()
