"""What the tests of a prompt's drawn queries have found under a floor of the kept mass, and what follows for the rest.

A *row* is a tile of queries, a KV head and a layer. Its drawn queries decide how much it reads. Tiles are kept by their
place in the prompt: what is computed again after a preemption takes the place of what was found before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
# As `longreach_kernels.sparse.select.mass_floor.FloorCounts`.
_ROWS, _WIDENED, _DENSE, _DECIDED, _KEPT = range(5)


@dataclass(frozen=True)
class FloorFound:
    """Sums over a prompt.

    Attributes:
        rows: tested rows.
        widened, dense: of these, rows that read more than was chosen, and rows that read everything.
        kept_mean, kept_least: the least mass that a drawn query keeps of what is read: mean over rows, and least.
        chosen_least: the least that a drawn query would have kept of what was chosen.
        below, below_most: share of all queries of the tested rows that keep less than the floor: an estimate that is
            too high rather than too low, and what it is at most, with `CONFIDENCE`.
    """

    rows: int
    widened: int
    dense: int
    kept_mean: float
    kept_least: float
    chosen_least: float
    below: float
    below_most: float


@dataclass(eq=False)
class FloorTests:
    """By tile of queries (its place in the prompt): counts (5,) fp64 and least masses (2,) of all layers and KV heads.

    `tile` is how many queries a tile has.
    """

    tile: int = 0
    _counts: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    _least: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)

    def add(self, start: int, tile: int, counts: npt.NDArray[np.float64], least: npt.NDArray[np.float32]) -> None:
        """Note what was found in the tiles from position `start` on: (tiles, 5) and (tiles, 2)."""
        self.tile = tile
        for index, (one, low) in enumerate(zip(counts, least, strict=True), start // tile):
            self._counts[index], self._least[index] = one, low

    def found(self, drawn: int, kv_heads: int) -> FloorFound:
        """The sums, of tiles of which `drawn` queries are drawn, in layers of `kv_heads`."""
        counts = sum(self._counts.values(), np.zeros(5))
        least = np.array([*self._least.values(), np.ones(2)]).min(0)
        rows = round(counts[_ROWS])
        below = counts[_DECIDED] / (drawn * max(1, rows))
        # A row's drawn queries are drawn once for all KV heads.
        below_most = min(1.0, below + margin(rows // kv_heads, drawn)) if rows else 0.0
        return FloorFound(
            rows=rows,
            widened=round(counts[_WIDENED]),
            dense=round(counts[_DENSE]),
            kept_mean=float(counts[_KEPT]) / rows if rows else 1.0,
            kept_least=float(least[0]),
            chosen_least=float(least[1]),
            below=float(below),
            below_most=float(below_most),
        )


def margin(draws: int, drawn: int, confidence: float = CONFIDENCE) -> float:
    """By how much the share of queries below the floor may exceed its estimate, the mean of `draws` of `drawn` queries.

    Leaving one drawn query out, a row reads no more than with it; whether that query then is below the floor tells
    without bias how many are. So the estimate is too high in the mean, and the differences of single draws are those of
    a martingale: none is above 1, and their variance is at most ``2 / ((n + 1) (n + 2)) + 1 / n^2``, since rows of
    which a share of x is below pass the test of n drawn queries with a probability of at most ``(1 - x)^n``.
    Freedman's inequality (1975) bounds their mean.
    """
    if draws == 0:
        return 1.0
    variance = 2 / ((drawn + 1) * (drawn + 2)) + 1 / drawn**2
    needed = -math.log(1 - confidence)
    linear = needed / (3 * draws)
    return linear + math.sqrt(linear**2 + 2 * variance * needed / draws)
