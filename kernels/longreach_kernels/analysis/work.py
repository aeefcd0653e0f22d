"""Exact counts of what attention costs under a mask: tiles, pairs, FLOPs, bytes, density."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach_kernels.masks.mask import Band, Mask
from longreach_kernels.masks.tile_lists import tile_lists
from longreach_kernels.masks.tile_ranges import key_ranges


@dataclass(frozen=True)
class Work:
    """What one head of attention costs under a mask.

    Attributes:
        tiles: key tiles visited, summed over the query tiles.
        partial_tiles: those of them that need masking.
        pairs: (query, key) pairs that the mask allows.
        flops: floating point operations of the visited tiles (two matrix products, 2 operations a multiply-add).
        kv_bytes: bytes of K and V read by the visited tiles, before any cache.
        density: allowed pairs over all pairs.
    """

    tiles: int
    partial_tiles: int
    pairs: int
    flops: int
    kv_bytes: int
    density: float


def work(
    mask: Mask,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    *,
    tile_q: int,
    tile_k: int,
    itemsize: int = 2,
    head: int = 0,
) -> Work:
    """Count exactly the work of one head.

    Args:
        mask: any mask.
        num_queries, num_keys: lengths, aligned at the bottom right; both at least 1.
        head_dim: channels of a head.
        tile_q, tile_k: tile sizes of the kernel; the last ones may be ragged. Where the mask has no closed form,
            ``tile_k`` must be a multiple of 32.
        itemsize: bytes of an element of K and V.
        head: which head, for a mask that tells heads apart.
    """
    if num_queries < 1 or num_keys < 1:
        raise ValueError(f"num_queries, num_keys: must be at least 1, got {num_queries} and {num_keys}")
    if mask.band is not None:
        pairs = int(_band_pairs(mask.band, num_queries, num_keys).sum())
        visits, partial = _band_visits(mask, num_queries, num_keys, tile_q, tile_k)
    else:
        visits, partial, pairs = _list_visits(mask, num_queries, num_keys, tile_q, tile_k, head)
    rows = torch.tensor([min(tile_q, num_queries - i * tile_q) for i in range(len(visits))])
    keys = torch.tensor([v[1] for v in visits])
    return Work(
        tiles=sum(v[0] for v in visits),
        partial_tiles=partial,
        pairs=pairs,
        flops=4 * head_dim * int((rows * keys).sum()),
        kv_bytes=2 * head_dim * itemsize * int(keys.sum()),
        density=pairs / (num_queries * num_keys),
    )


def _band_pairs(band: Band, num_queries: int, num_keys: int) -> Tensor:
    """Keys that each query sees, int64 (num_queries,)."""
    q = torch.arange(num_keys - num_queries, num_keys)
    right = (q + 1).clamp(0, num_keys) if band.causal else torch.full_like(q, num_keys)
    if band.window is None:
        return right
    left = torch.minimum((q - band.window + 1).clamp(min=0), right)
    return right - left + left.clamp(max=band.sinks)


def _band_visits(
    mask: Mask, num_queries: int, num_keys: int, tile_q: int, tile_k: int
) -> tuple[list[tuple[int, int]], int]:
    """(tiles, keys) that each query tile visits, and the number of partial tiles."""
    visits, partial, offset = [], 0, num_keys - num_queries
    for start in range(0, num_queries, tile_q):
        ranges = key_ranges(mask, offset + start, offset + min(start + tile_q, num_queries), num_keys, tile_k)
        tiles = sum(r.end - r.start for r in ranges)
        keys = sum(min(r.end * tile_k, num_keys) - r.start * tile_k for r in ranges)
        visits.append((tiles, keys))
        partial += sum(r.end - r.start for r in ranges if r.partial)
    return visits, partial


def _list_visits(
    mask: Mask, num_queries: int, num_keys: int, tile_q: int, tile_k: int, head: int
) -> tuple[list[tuple[int, int]], int, int]:
    """As `_band_visits`, and the number of pairs."""
    lists = tile_lists(mask, num_queries, num_keys, tile_q, tile_k)
    if not 0 <= head < mask.heads:
        raise ValueError(f"head: the mask tells {mask.heads} heads apart, got {head}")
    set_bits = ((lists.bits[..., None] >> torch.arange(32)) & 1).sum((1, 2, 3)).tolist()
    visits, partial, pairs = [], 0, 0
    num_q_tiles = -(-num_queries // tile_q)
    for i in range(num_q_tiles):
        row = lists.row(head * num_q_tiles + i)
        keys = 0
        for tile, bit_tile in row:
            width = min(tile_k, num_keys - tile * tile_k)
            keys += width
            partial += bit_tile >= 0
            pairs += width * min(tile_q, num_queries - i * tile_q) if bit_tile < 0 else set_bits[bit_tile]
        visits.append((len(row), keys))
    return visits, partial, pairs
