"""What a request's attention policy left out: counted from masks where they say it, else from what was measured.

Pairs, tiles and bytes are of all heads, whichever rank computes them. Of a prompt they are of the layers that see
everything, and of those with windows that a policy narrows: of others nothing can be left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from longreach_kernels import Mask
from longreach_kernels.masks.block_rules import BlockRule
from longreach_kernels.masks.tile_counts import TileCount, tile_count
from longreach_kernels.sparse import keys_read
from longreach_kernels.sparse.select.mass_floor import drawn_count

from longreach.engine.device.policies.layer_masks import LayerPolicies
from longreach.engine.requests.floor_tests import CONFIDENCE
from longreach.engine.requests.request import Request
from longreach.engine.updates import AttentionUse, DecodeUse, FloorUse, KeptMass, LayerCount
from longreach.policies.values import SparseDecode, StepPolicy
from longreach.sizes import TILE


class PolicyUsage:
    """Counts for one model, whose layers that attend compute what `policies` says; `state_layers` keep a state."""

    def __init__(self, policies: LayerPolicies, state_layers: int = 0) -> None:
        self._policies = policies
        self._own = policies.own
        self._shape = policies.shape
        self._chosen = policies.chosen
        self._state_layers = state_layers
        self.heads = policies.heads

    def pairs(self, policy: StepPolicy, start: int, end: int) -> float:
        """Pairs that the queries at positions `start` to `end` compute, over all layers, as a mean of the heads."""
        if isinstance(policy, SparseDecode):
            rest = Counter(mask for index, mask in enumerate(self._own) if index not in self._chosen)
            read = sum(keys_read(position + 1, policy.budget) for position in range(start, end))
            return len(self._chosen) * read + sum(n * _pairs(mask, start, end) for mask, n in rest.items())
        return sum(layers * _pairs(mask, start, end) for mask, layers in Counter(self._policies.masks(policy)).items())

    def of_prompt(self, request: Request, kept: list[npt.NDArray[np.float32]]) -> AttentionUse:
        """What a request's prompt was computed with; `kept` is what was measured of it, as `Measurements.kept`."""
        policy = request.spec.attention
        full, masks = self._policies.full, self._policies.masks(policy)
        counted = full | self._policies.narrowed(policy)
        dense = self._count([self._own[index] for index in counted], request)
        others = self._count([mask for index, mask in enumerate(self._own) if index not in counted], request)
        tile = (TILE, TILE)
        if policy.is_dynamic:
            seen, dense = self._in_tiles(request, dense)
            tile = self._policies.tile
        else:
            seen = self._count([masks[index] for index in counted], request)
        group = self.heads // self._shape.num_kv_heads
        skipped = dense.tiles - seen.tiles
        return AttentionUse(
            policy=policy,
            layers=LayerCount(
                changed=len(self._policies.changed(policy)),
                full=len(full),
                window=len(self._own) - len(full),
                state=self._state_layers,
            ),
            pairs=seen.pairs,
            dense_pairs=dense.pairs,
            tiles=seen.tiles,
            dense_tiles=dense.tiles,
            flops_saved=skipped * 4 * tile[0] * tile[1] * self._shape.head_dim,
            kv_bytes_saved=skipped // group * 2 * tile[1] * self._shape.head_dim * self._shape.dtype.itemsize,
            other_pairs=others.pairs,
            unchosen=request.measured.tiles.dropped * group,
            kept_mass=_kept_mass(kept),
            floor=self._floor(request),
        )

    def _floor(self, request: Request) -> FloorUse | None:
        """What the tests of drawn queries found; None without a floor of the kept mass."""
        floor = request.spec.attention.parameters.get("min_mass")
        if floor is None:
            return None
        drawn = drawn_count(self._policies.tile[0])
        found = request.measured.floor.found(drawn, self._shape.num_kv_heads)
        return FloorUse(min_mass=floor, drawn=drawn, confidence=CONFIDENCE, **asdict(found))

    def of_answer(self, request: Request) -> DecodeUse | None:
        """What a request's answer has read so far under its decode budget; None if it has none."""
        reads = request.reads
        if reads is None:
            return None
        heads = len(self._chosen) * self._shape.num_kv_heads
        again = self._shape.num_kv_heads * reads.whole_keys
        # Of two: a bound has as many.
        numbers = 2 * (heads * (reads.keys - reads.read - reads.blocks) - again) * self._shape.head_dim
        return DecodeUse(
            policy=request.spec.attention,
            queries=reads.queries,
            keys=heads * reads.keys,
            keys_read=heads * reads.read + again,
            whole_share=reads.whole / max(1, reads.queries * len(self._chosen)),
            kv_bytes_saved=numbers * self._shape.dtype.itemsize,
            missed_mean=reads.missed_sum / max(1, reads.queries),
            missed_max=reads.missed_max,
            sampled=reads.sampled,
            kept_mean=reads.kept_sum / reads.sampled if reads.sampled else 1.0,
            kept_least=reads.kept_least,
        )

    def _count(self, masks: Sequence[Mask], request: Request) -> TileCount:
        counts = (
            tile_count(mask, request.cached, request.prompt_tokens) * (layers * self.heads // mask.heads)
            for mask, layers in Counter(masks).items()
        )
        return sum(counts, TileCount())

    def _in_tiles(self, request: Request, dense: TileCount) -> tuple[TileCount, TileCount]:
        """What a dynamic policy chose, and all, in the kernel's tiles and over the layers where tiles are chosen."""
        rest = self._count([self._own[index] for index in self._policies.full - self._policies.tiled], request)
        group, measured = self.heads // self._shape.num_kv_heads, request.measured.tiles
        tiles, everything = measured.visited * group, measured.offered * group
        if not request.spec.attention.chooses_tiles:
            tiling = self._policies.tiling
            tiles = everything = tiling.tiles(request.cached, request.prompt_tokens) * group * len(self._policies.tiled)
        # How many pairs causality hides in the chosen tiles is not known on the host: they count as the mean tile does.
        pairs = rest.pairs + round((dense.pairs - rest.pairs) * (tiles / everything if everything else 1.0))
        return TileCount(tiles, pairs), TileCount(everything, dense.pairs)


def _kept_mass(kept: list[npt.NDArray[np.float32]]) -> KeptMass | None:
    if not kept:
        return None
    values = np.concatenate(kept).astype(np.float64)
    return KeptMass(
        queries=len(values),
        mean=float(values.mean()),
        p5=float(np.quantile(values, 0.05)),
        least=float(values.min()),
    )


def _pairs(mask: Mask, start: int, end: int) -> float:
    if end == start + 1 and isinstance(mask, BlockRule):  # an answer's next token: most often in the block of its last
        return _blocks_before(mask, start // TILE) * TILE / mask.heads + start % TILE + 1
    return tile_count(mask, start, end).pairs / mask.heads


@lru_cache(maxsize=4096)
def _blocks_before(mask: BlockRule, row: int) -> int:
    """Blocks that a row of blocks sees before its own, over the mask's heads."""
    return sum(len(mask.row(row, head)) - 1 for head in range(mask.heads))
