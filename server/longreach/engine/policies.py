"""What each layer computes under a request's attention policy, and what that leaves out."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from longreach_kernels import Causal, Mask, PagedBatch
from longreach_kernels.block_rules import BLOCK, BlockRule, for_heads
from longreach_kernels.dynamic import Antidiagonal, Density, Pooled, Recall, Speedup
from longreach_kernels.policies import policy_mask
from longreach_kernels.tile_counts import TILE, TileCount, tile_count
from longreach_patches import MassSample, PageShape, StepGroup, TileChoice, masks_under

from .batch import HostBatch, HostGroup
from .messages import DENSE, AttentionPolicy, AttentionUse, Generate, KeptMass
from .request import Request
from .transfer import upload

_CAUSAL = Causal().band
# Policies come from callers: so many are remembered, with what was made of them.
_REMEMBERED = 64
_TARGETS = {"recall": Recall, "density": Density, "speedup": Speedup}
_ESTIMATORS = {"antidiagonal": Antidiagonal(), "pooled": Pooled()}
# A dynamic policy needs a step to hold some whole tiles beside the answers that are being written.
_LEAST_STEP = 4 * TILE


class LayerPolicies:
    """The masks of one model's layers under every policy.

    `own` are the layers' own masks, `heads` the query heads of each, `shape` that of their keys; no policy touches
    `dense_layers`. `tile` is (queries, keys) of the tiles that dynamic policies choose, `step_tokens` the most of a
    step. Where heads are split over ranks, `part` are this one's; all that is counted is of all heads.

    Raises:
        ValueError: there is no such layer.
    """

    def __init__(
        self,
        own: tuple[Mask, ...],
        heads: int,
        shape: PageShape,
        dense_layers: Sequence[int] = (),
        *,
        tile: tuple[int, int] = (TILE, TILE),
        step_tokens: int = _LEAST_STEP,
        part: range | None = None,
    ) -> None:
        wrong = [layer for layer in dense_layers if not -len(own) <= layer < len(own)]
        if wrong:
            raise ValueError(
                f"--attention-dense-layers: the model has layers 0 to {len(own) - 1}, or -{len(own)} to -1 from its "
                f"end; there is no layer {wrong[0]}"
            )
        self.heads = heads
        self._part = range(heads) if part is None else part
        self._own = own
        self._shape = shape
        self._tile = tile
        self._step_tokens = step_tokens
        self._dense_layers = frozenset(layer % len(own) for layer in dense_layers)
        self._full = frozenset(index for index, mask in enumerate(own) if mask.band == _CAUSAL)
        self._known: OrderedDict[AttentionPolicy, tuple[tuple[Mask, ...], tuple[Mask, ...]]] = OrderedDict()

    @property
    def dense_share(self) -> float:
        """Of the layers that see everything, the share that no policy touches."""
        return len(self._dense_layers & self._full) / len(self._full) if self._full else 1.0

    def check(self, spec: Generate) -> None:
        """See whether a request can be computed under its policy.

        Raises:
            ValueError: it cannot; the message is the caller's.
        """
        if spec.attention.is_dynamic:
            self._check_dynamic(spec)
            return
        told_apart = max(mask.heads for mask in self.masks(spec.attention))
        if self.heads % told_apart:
            raise ValueError(
                f"`attention`: the policy {spec.attention.name} tells {told_apart} groups of heads apart, which the "
                f"model's {self.heads} heads are not a multiple of"
            )

    def _check_dynamic(self, spec: Generate) -> None:
        if spec.prompt_logprobs is not None:
            raise ValueError(
                "`attention`: the log-probabilities of a prompt are computed in chunks too small to choose tiles for; "
                "leave them out, or take another policy"
            )
        if self._shape.page_size % TILE:
            raise ValueError(
                f"`attention`: dynamic needs KV pages of whole tiles; this server's --page-size is "
                f"{self._shape.page_size}, a multiple of {TILE} would do"
            )
        if self._step_tokens < _LEAST_STEP:
            raise ValueError(
                f"`attention`: dynamic reads a prompt in whole tiles; this server's --max-batched-tokens is "
                f"{self._step_tokens}, {_LEAST_STEP} would do"
            )

    def masks(self, policy: AttentionPolicy) -> tuple[Mask, ...]:
        """What each layer computes, first to last, where no tiles are chosen."""
        return self._own if policy == DENSE or policy.is_dynamic else self._under(policy)[0]

    def _under(self, policy: AttentionPolicy) -> tuple[tuple[Mask, ...], tuple[Mask, ...]]:
        """What each layer computes under a static policy, for all heads and for this rank's."""
        if policy not in self._known:
            mask = policy_mask(policy.name, **dict(policy.parameters))
            everywhere = here = masks_under(mask, self._own, self._dense_layers)
            if mask.heads > 1 and len(self._part) < self.heads:
                here = masks_under(for_heads(mask, self._part, self.heads), self._own, self._dense_layers)
            self._known[policy] = everywhere, here
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(policy)
        return self._known[policy]

    def groups(
        self, batch: HostBatch, paged: PagedBatch, samples: Sequence[MassSample | None] | None = None
    ) -> tuple[StepGroup, ...]:
        """The groups of a step, whose sequences together are `paged`, and the sample of each; none if all are dense.

        They are for the heads that this rank computes.
        """
        if not batch.groups:
            return ()
        device = paged.context_lens.device
        starts = upload([group.cu_seqlens_q for group in batch.groups], device)
        return tuple(
            StepGroup(
                group.rows.start,
                group.rows.stop,
                PagedBatch(
                    cu_seqlens_q=cu_seqlens_q,
                    context_lens=paged.context_lens[group.sequences],
                    page_table=paged.page_table[group.sequences],
                    max_seqlen_q=group.max_seqlen_q,
                    max_context_len=group.max_context_len,
                    num_decodes=group.num_decodes,
                    known_lengths=(
                        tuple(np.diff(group.cu_seqlens_q).tolist()),
                        tuple(batch.context_lens[group.sequences].tolist()),
                    ),
                ),
                None if group.policy == DENSE else self._own_heads(group.policy),
                sample,
                self._choice(group, device) if group.policy.is_dynamic else None,
            )
            for group, cu_seqlens_q, sample in zip(
                batch.groups, starts, samples or [None] * len(batch.groups), strict=True
            )
        )

    def bands(self, policy: AttentionPolicy) -> tuple[Mask, ...] | None:
        """What each layer computes for this rank's heads, or None if one of them needs lists of tiles."""
        if policy.is_dynamic:
            return None
        masks = self._own if policy == DENSE else self._own_heads(policy)
        return None if any(mask.band is None for mask in masks) else masks

    def _own_heads(self, policy: AttentionPolicy) -> tuple[Mask, ...]:
        """What each layer computes for this rank's heads."""
        return self._own if policy.is_dynamic else self._under(policy)[1]

    def _choice(self, group: HostGroup, device: torch.device) -> TileChoice:
        parameters: dict[str, Any] = dict(group.policy.parameters)
        [target] = [kind(parameters[name]) for name, kind in _TARGETS.items() if name in parameters]
        [lengths] = upload([group.prompt_lens], device)
        return TileChoice(target, _ESTIMATORS[parameters["estimator"]], lengths, self._full - self._dense_layers)

    def pairs(self, policy: AttentionPolicy, start: int, end: int) -> float:
        """Pairs that the queries at positions `start` to `end` compute, over all layers, as a mean of the heads."""
        return sum(layers * _pairs(mask, start, end) for mask, layers in Counter(self.masks(policy)).items())

    def use(self, request: Request) -> AttentionUse:
        """What a request's prompt was computed with; takes what was measured of it."""
        policy = request.spec.attention
        dense = self._count(self._own, request)
        tile = (TILE, TILE)
        if policy.is_dynamic:
            seen, dense = self._chosen(request, dense)
            tile = self._tile
        else:
            seen = self._count(self.masks(policy), request)
        kept, request.kept = request.kept, []
        group = self.heads // self._shape.num_kv_heads
        skipped = dense.tiles - seen.tiles
        return AttentionUse(
            policy=policy,
            pairs=seen.pairs,
            dense_pairs=dense.pairs,
            tiles=seen.tiles,
            dense_tiles=dense.tiles,
            flops_saved=skipped * 4 * tile[0] * tile[1] * self._shape.head_dim,
            kv_bytes_saved=skipped // group * 2 * tile[1] * self._shape.head_dim * self._shape.dtype.itemsize,
            kept_mass=_kept_mass(kept),
        )

    def _count(self, masks: Sequence[Mask], request: Request) -> TileCount:
        counts = (
            tile_count(mask, request.cached, request.prompt_tokens) * (layers * self.heads // mask.heads)
            for mask, layers in Counter(masks).items()
        )
        return sum(counts, TileCount())

    def _chosen(self, request: Request, dense: TileCount) -> tuple[TileCount, TileCount]:
        """What a dynamic policy chose, and all, in the kernel's tiles and over the layers where tiles are chosen."""
        layers = self._full - self._dense_layers
        rest = self._count([mask for index, mask in enumerate(self._own) if index not in layers], request)
        tile_q, tile_k = self._tile
        ends = np.minimum(np.arange(request.cached, request.prompt_tokens, tile_q) + tile_q, request.prompt_tokens)
        everything = int((-(-ends // tile_k)).sum()) * len(layers) * self.heads
        tiles = request.visited * (self.heads // self._shape.num_kv_heads)
        # How many pairs causality hides in the chosen tiles is not known on the host: they count as the mean tile does.
        pairs = rest.pairs + round((dense.pairs - rest.pairs) * (tiles / everything if everything else 1.0))
        return TileCount(tiles, pairs), TileCount(everything, dense.pairs)


def _kept_mass(kept: list[np.ndarray]) -> KeptMass | None:
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
        return _blocks_before(mask, start // BLOCK) * BLOCK / mask.heads + start % BLOCK + 1
    return tile_count(mask, start, end).pairs / mask.heads


@lru_cache(maxsize=4096)
def _blocks_before(mask: BlockRule, row: int) -> int:
    """Blocks that a row of blocks sees before its own, over the mask's heads."""
    return sum(len(mask.row(row, head)) - 1 for head in range(mask.heads))
