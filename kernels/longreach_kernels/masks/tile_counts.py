"""What a mask leaves of causal attention, counted for a stretch of a sequence: tiles and pairs, exactly or on a sample.

Tiles are `TILE` queries by `TILE` keys at multiples of `TILE`, whatever a kernel's own tiles are and wherever a chunk
begins, so that a count says something of the mask alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longreach_kernels.masks.block_rules import BlockRule
from longreach_kernels.masks.mask import Band, Mask
from longreach_kernels.masks.tile_ranges import key_ranges
from longreach_kernels.sizes import TILE

_SLAB_TILES = 1 << 20  # tiles looked at together
_SLAB_PAIRS = 1 << 22  # pairs looked at together


@dataclass(frozen=True)
class TileCount:
    """Key tiles that hold a visible pair, visible pairs, and the same under causality alone: sums over the mask's heads
    and the query tiles counted."""

    tiles: int = 0
    pairs: int = 0
    causal_tiles: int = 0
    causal_pairs: int = 0

    @property
    def density(self) -> float:
        """Visible pairs of those that causality allows; 1 where there are none."""
        return self.pairs / self.causal_pairs if self.causal_pairs else 1.0

    def __add__(self, other: TileCount) -> TileCount:
        return TileCount(
            self.tiles + other.tiles,
            self.pairs + other.pairs,
            self.causal_tiles + other.causal_tiles,
            self.causal_pairs + other.causal_pairs,
        )

    def __mul__(self, times: int) -> TileCount:
        """The same for so many heads or layers."""
        return TileCount(self.tiles * times, self.pairs * times, self.causal_tiles * times, self.causal_pairs * times)


@lru_cache(maxsize=256)
def tile_count(mask: Mask, start: int, end: int, most_rows: int | None = None) -> TileCount:
    """Count the queries at positions ``start <= q < end``, over the keys at or before them.

    Args:
        mask: a causal mask.
        start, end: positions; an empty stretch counts nothing.
        most_rows: look at no more query tiles than that, evenly spread, and count those alone; None: at all.
    """
    rows = torch.arange(start // TILE, -(-end // TILE)) if end > start else torch.zeros(0, dtype=torch.int64)
    if most_rows is not None and len(rows) > most_rows:
        rows = rows[torch.arange(most_rows) * len(rows) // most_rows]
    q = torch.stack([(rows * TILE).clamp(min=start), ((rows + 1) * TILE).clamp(max=end) - 1], dim=1)
    causal = TileCount(0, 0, int((rows + 1).sum()), int(((q[:, 0] + q[:, 1] + 2) * (q[:, 1] - q[:, 0] + 1) // 2).sum()))
    causal = causal * mask.heads
    if mask.band is not None:
        tiles, pairs = _count_band(mask, mask.band, q)
    else:
        tiles, pairs = _count_tiles(mask, q)
    return TileCount(tiles, pairs, causal.causal_tiles, causal.causal_pairs)


def _count_band(mask: Mask, band: Band, q: Tensor) -> tuple[int, int]:
    tiles = pairs = 0
    for first, last in q.tolist():
        tiles += sum(r.end - r.start for r in key_ranges(mask, first, last + 1, last + 1, TILE))
        if band.window is None:
            pairs += (first + last + 2) * (last - first + 1) // 2
            continue
        seen = torch.arange(first, last + 1) + 1
        before = (seen - band.window).clamp(min=0)
        pairs += int((seen - before + before.clamp(max=band.sinks)).sum())
    return tiles, pairs


def _count_tiles(mask: Mask, q: Tensor) -> tuple[int, int]:
    tiles = pairs = start = 0
    while start < len(q):
        # As many rows as keep the slab, which reaches to the last row's diagonal, within bounds.
        stop = start + 1
        while stop < len(q) and (stop + 1 - start) * (int(q[stop, 1]) // TILE + 1) * mask.heads <= _SLAB_TILES:
            stop += 1
        slab = q[start:stop]
        last = int(slab[-1, 1])
        first_key = torch.arange(0, last + 1, TILE)
        k = torch.stack([first_key, (first_key + TILE - 1).clamp(max=last)], dim=1)
        some, every = mask.tile_state(slab, k)
        every = every & some
        area = (slab[:, 1] - slab[:, 0] + 1)[:, None] * (k[:, 1] - k[:, 0] + 1)[None]
        tiles += int(every.sum())
        pairs += int((every * area).sum())
        partial = (some & ~every).nonzero()
        for part in partial.split(_SLAB_PAIRS // TILE**2):
            seen = _pairs_of(mask, slab[part[:, 1]], k[part[:, 2]], part[:, 0])
            tiles += int((seen > 0).sum())
            pairs += int(seen.sum())
        start = stop
    return tiles, pairs


def _pairs_of(mask: Mask, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
    """Visible pairs of each tile, int64 (n,)."""
    if isinstance(mask, BlockRule):
        # The tile is in one block and not hidden, and it is partial: it is cut by the diagonal alone.
        rows = q[:, :1] + torch.arange(TILE)
        seen = (torch.minimum(rows, k[:, 1:]) - k[:, :1] + 1).clamp(min=0)
        return (seen * (rows <= q[:, 1:])).sum(1)
    inside = torch.arange(TILE)
    rows, keys = q[:, :1] + inside, k[:, :1] + inside
    seen = mask.sees(
        torch.minimum(rows, q[:, 1:])[:, :, None], torch.minimum(keys, k[:, 1:])[:, None, :], head[:, None, None]
    )
    return (seen & (rows <= q[:, 1:])[:, :, None] & (keys <= k[:, 1:])[:, None, :]).sum((1, 2))


def sampled_coverage(mask: Mask, length: int, *, size: int = 64, samples: int = 16, seed: int = 0) -> Tensor:
    """Share of visible pairs in each cell of a picture of a mask, mean over its heads: fp32 (n, n), rows are queries.

    Cells hold ``length / n`` positions each way, n = min(size, length). Of a cell's positions at most ``samples`` each
    way are looked at, one drawn from each of as many equal parts: no regular pattern hides between them. With
    ``length <= n * samples`` the shares are exact.

    Raises:
        ValueError: a number is below 1.
    """
    for name, value in (("length", length), ("size", size), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, got {value}")
    n = min(size, length)
    bounds = torch.arange(n + 1) * length // n
    most = int(bounds.diff().max())
    each = min(samples, most)
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, Tensor]:
        """(n, each) positions, and whether each counts: a cell may hold fewer."""
        width = bounds.diff()[:, None]
        if each == most:
            at = torch.arange(each)[None].expand(n, -1)
        else:
            part = torch.arange(each)[None] + torch.rand(n, each, generator=generator)
            at = (part * width / each).long()
        return bounds[:-1, None] + at.clamp(max=width - 1), at < width

    (q, real_q), (k, real_k) = draw(), draw()
    cells = torch.zeros(n, n)
    per_slab = max(1, _SLAB_PAIRS // (mask.heads * each * n * each))
    for start in range(0, n, per_slab):
        rows = slice(start, start + per_slab)
        seen = mask.allowed(q[rows].flatten(), k.flatten())
        seen = seen.expand(mask.heads, *seen.shape[-2:]).float().mean(0).view(-1, each, n, each)
        weight = (real_q[rows, :, None, None] & real_k[None, None]).float()
        cells[rows] = (seen * weight).sum((1, 3)) / weight.sum((1, 3))
    return cells
