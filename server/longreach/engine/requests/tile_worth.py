"""Whether choosing key tiles of a prompt is worth what it costs: decided layer by layer, by what earlier tokens chose.

A prompt has spans of `SPAN` tokens. In each span a layer either chooses the tiles of all queries, or computes dense
attention. It chooses until the share of tiles that it chose in the last known span is so large that dense attention
takes no longer. From then on it is dense, and in some later spans the last `PROBE` queries are probed: what they would
choose is counted. The distance between probes doubles up to `_MOST_WAIT` spans.

What is decided depends on the request's own prompt alone, and not on how it is cut into chunks: a span's decision looks
at spans so far back that the steps which computed them have ended in any case.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from longreach.sizes import TILE

SPAN = 8192
# Kernels of estimates compute the products of 1,024 queries or more at once, so that fewer would cost as much.
PROBE = 1024
_MOST_WAIT = 4


def break_even(keys: int) -> float:
    """The share of the tiles of `keys` keys from which on choosing them is not worth what it costs.

    An H200 takes 5.1 percent of dense attention's time for an estimate, and 0.15 ms for each choice and its lists, as
    long as for 700 keys of a chunk (8,192 queries, 32 heads of 128 channels). A chosen tile takes as long as any other.
    Of what is left a gain of less than 3 percent counts as none: dense attention is exact.
    """
    return max(0.0, 0.92 - 700 / max(1, keys))


@dataclass(frozen=True)
class Tiling:
    """How a model chooses tiles.

    Attributes:
        layers: where tiles are chosen.
        tile: queries and keys of a tile.
        kv_heads: of a layer, each with tiles of its own.
        lag: the decision for a span looks at spans that lie at least so many before it.
    """

    layers: frozenset[int]
    tile: tuple[int, int]
    kv_heads: int
    lag: int

    @classmethod
    def of(cls, layers: frozenset[int], tile: tuple[int, int], kv_heads: int, step_tokens: int) -> Tiling:
        """For steps of at most `step_tokens`: when one is planned, all but the one before it have ended."""
        return cls(layers, tile, kv_heads, 1 + math.ceil(2 * step_tokens / SPAN))

    def tiles(self, start: int, end: int) -> int:
        """All tiles of the queries at positions `start` to `end` in a layer, `start` being a multiple of the tile."""
        tile_q, tile_k = self.tile
        ends = (min(first + tile_q, end) for first in range(start, end, tile_q))
        return self.kv_heads * sum(-(-last // tile_k) for last in ends)


@dataclass(frozen=True)
class TilePart:
    """Queries of a chunk that lie in one span, at positions `start` to `end`.

    Attributes:
        dense: layers that compute dense attention.
        probed: those of them in which the queries from `probe_start` on are probed.
        is_below: whether all layers are dense since the policy says so, whatever it costs.
        tiles, probe_tiles: all tiles of the queries, and of those that are probed, in one layer.
    """

    start: int
    end: int
    dense: frozenset[int]
    probed: frozenset[int] = frozenset()
    probe_start: int = 0
    is_below: bool = False
    tiles: int = 0
    probe_tiles: int = 0


@dataclass(eq=False)
class TileHistory:
    """What has been chosen of one request's prompt.

    Attributes:
        visited, offered: tiles that were computed, and all, over layers, KV heads and query tiles, where layers choose.
        dropped: those of them in layers and spans that were dense since choosing did not pay.
        end: up to which position they are counted; what a preemption has computed again is not.
    """

    visited: int = 0
    offered: int = 0
    dropped: int = 0
    end: int = 0
    _chosen: Counter[tuple[int, int]] = field(default_factory=Counter)  # by span and layer
    _of: Counter[tuple[int, int]] = field(default_factory=Counter)

    def parts(self, start: int, end: int, prompt_tokens: int, dense_below: int, tiling: Tiling) -> list[TilePart]:
        """The queries at positions `start` to `end` of a prompt, `start` being a multiple of the tile."""
        edge = -(-dense_below // TILE) * TILE
        borders = sorted({start, end, edge, *range(start // SPAN * SPAN, end, SPAN)})
        borders = [border for border in borders if start <= border <= end]
        return [self._part(first, last, prompt_tokens, edge, tiling) for first, last in pairwise(borders)]

    def _part(self, start: int, end: int, prompt_tokens: int, edge: int, tiling: Tiling) -> TilePart:
        span = start // SPAN
        is_below = start < edge
        dense = probed = tiling.layers
        if not is_below:
            dense, probed = self._decide(span, tiling)
        # What is found here decides the spans from here on that are `lag` away, if there are any that may choose.
        first, last = (span + tiling.lag) * SPAN, (span + tiling.lag + 1) * SPAN
        probe_start = max(start, (span + 1) * SPAN - PROBE)
        if first >= prompt_tokens or last <= edge or probe_start >= end:
            probed = frozenset()
        return TilePart(
            start,
            end,
            dense,
            probed,
            probe_start,
            is_below,
            tiles=tiling.tiles(start, end),
            probe_tiles=tiling.tiles(probe_start, end) if probed else 0,
        )

    def _decide(self, span: int, tiling: Tiling) -> tuple[frozenset[int], frozenset[int]]:
        """The layers that are dense in a span, and those of them that are to be probed at its end."""
        dense, probed = set(), set()
        for layer in tiling.layers:
            known = [one for one in range(span - tiling.lag, -1, -1) if self._of[one, layer]]
            fails = 0
            for one in known:
                if self._chosen[one, layer] / self._of[one, layer] < break_even((one + 1) * SPAN):
                    break
                fails += 1
            if fails:
                dense.add(layer)
                if (span - known[0]) % min(2**fails, _MOST_WAIT) == 0:
                    probed.add(layer)
        return frozenset(dense), frozenset(probed)

    def add(self, part: TilePart, chosen: dict[int, int]) -> None:
        """Count a part that has been computed; `chosen` are its tiles, or its probe's, by layer."""
        if part.start < self.end:
            return
        self.end = part.end
        span = part.start // SPAN
        for layer, count in chosen.items():
            self.offered += part.tiles
            self.visited += part.tiles if layer in part.dense else count
            if layer in part.dense:
                self.dropped += 0 if part.is_below else part.tiles
            if layer in part.probed:
                self._chosen[span, layer] += count
                self._of[span, layer] += part.probe_tiles
            elif layer not in part.dense:
                self._chosen[span, layer] += count
                self._of[span, layer] += part.tiles
