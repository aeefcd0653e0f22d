"""What each layer computes under a request's attention policy, and what that leaves out."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from longreach_kernels import Mask, PagedBatch
from longreach_kernels.masks.block_rules import BLOCK, BlockRule, for_heads
from longreach_kernels.masks.named import policy_mask
from longreach_kernels.masks.tile_counts import TILE, TileCount, tile_count
from longreach_kernels.sparse import (
    Antidiagonal,
    Density,
    Moments,
    Pooled,
    Recall,
    Speedup,
    keys_read,
)
from longreach_patches import BlockBudget, MassSample, PageShape, StepGroup, TileChoice, chosen_layers, masks_under

from longreach.engine.device.batch_builder import HostBatch, HostGroup
from longreach.engine.messages import DENSE, AttentionPolicy, AttentionUse, DecodeUse, Generate, KeptMass
from longreach.engine.requests.request import Request
from longreach.util.transfer import upload

# Policies come from callers: so many are remembered, with what was made of them.
_REMEMBERED = 64
_TARGETS = {"recall": Recall, "density": Density, "speedup": Speedup}
_ESTIMATORS = {"antidiagonal": Antidiagonal(), "moments": Moments(), "pooled": Pooled()}
# "auto" in layers with rotary positions and without. Rotated keys differ from one to the next, and their mean says
# little; where nothing is rotated a query looks for what a key says, and single keys matter.
_AUTO = {True: "antidiagonal", False: "moments"}
# A dynamic policy needs a step to hold some whole tiles beside the answers that are being written.
_LEAST_STEP = 4 * TILE


class LayerPolicies:
    """The masks of one model's layers under every policy.

    `own` are the layers' own masks, `heads` the query heads of each, `shape` that of their keys; no policy touches
    `dense_layers`. `tile` is (queries, keys) of the tiles that dynamic policies choose, `step_tokens` the most of a
    step. `rotary` says of each layer whether it has rotary positions, all if it is None. Where heads are split over
    ranks, `part` are this one's; all that is counted is of all heads.

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
        rotary: Sequence[bool] | None = None,
    ) -> None:
        self._chosen = frozenset(chosen_layers(own, dense_layers))
        self._rotary = [True] * len(own) if rotary is None else rotary
        self.heads = heads
        self._part = range(heads) if part is None else part
        self._own = own
        self._shape = shape
        self._tile = tile
        self._step_tokens = step_tokens
        self._dense_layers = frozenset(layer % len(own) for layer in dense_layers)
        self._full = frozenset(chosen_layers(own))
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
        if spec.attention.decode_budget is not None and not self._shape.bounded:
            raise ValueError(
                "`attention.decode_budget`: this server keeps no bounds of keys; start it with --page-bounds"
            )

    def masks(self, policy: AttentionPolicy) -> tuple[Mask, ...]:
        """What each layer computes, first to last, where no tiles are chosen."""
        return self._own if _keeps_masks(policy) else self._under(policy)[0]

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
        groups = []
        for group, cu_seqlens_q, sample in zip(
            batch.groups, starts, samples or [None] * len(batch.groups), strict=True
        ):
            rows = group.rows.start, group.rows.stop
            if group.policy.is_decode:
                groups.append(StepGroup(*rows, *self._decodes(group, batch, paged, sample)))
                continue
            alone = PagedBatch(
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
            )
            masks = None if group.policy == DENSE else self._own_heads(group.policy)
            choice = self._choice(group, device) if _chooses_tiles(group.policy) else None
            groups.append(StepGroup(*rows, alone, masks, sample, choice))
        return tuple(groups)

    def answers(
        self, policy: AttentionPolicy, start: int, batch: PagedBatch, *, measured: bool = False
    ) -> StepGroup | None:
        """Answers under a policy as the rows from `start` on of a step that is captured, for this rank's heads; with
        `measured` what each of them keeps within a budget of keys is looked at, too.

        None if a layer needs lists of tiles, which are made on the host.
        """
        rows = start, start + batch.size
        if policy.is_decode:
            every = torch.arange(batch.size, device=batch.context_lens.device)
            sample = MassSample(every, batch) if measured else None
            return StepGroup(*rows, batch, sample=sample, budget=self._budget(policy, batch))
        if policy.is_dynamic:
            return None
        masks = self._own if policy == DENSE else self._own_heads(policy)
        return None if any(mask.band is None for mask in masks) else StepGroup(*rows, batch, masks)

    def _budget(self, policy: AttentionPolicy, batch: PagedBatch) -> BlockBudget:
        assert policy.decode_budget is not None
        return BlockBudget(policy.decode_budget, self._chosen, batch, len(self._part))

    def _own_heads(self, policy: AttentionPolicy) -> tuple[Mask, ...]:
        """What each layer computes for this rank's heads."""
        return self._own if _keeps_masks(policy) else self._under(policy)[1]

    def _decodes(
        self, group: HostGroup, batch: HostBatch, paged: PagedBatch, sample: MassSample | None
    ) -> tuple[PagedBatch, None, MassSample | None, None, BlockBudget]:
        """Batch, masks, sample, choice and budget of a group that reads a budget of keys.

        Each token is a sequence of its own: keys are chosen for one query, and a token that was drafted, or is computed
        again with others, reads what it would read alone.
        """
        count = group.rows.stop - group.rows.start
        owners = np.repeat(np.arange(group.sequences.start, group.sequences.stop), np.diff(group.cu_seqlens_q))
        lengths = (batch.positions[group.rows] + 1).astype(np.int32)
        device = paged.context_lens.device
        [owner] = upload([owners], device)
        starts, lens = upload([np.arange(count + 1, dtype=np.int32), lengths], device)
        alone = PagedBatch(
            cu_seqlens_q=starts,
            context_lens=lens,
            page_table=paged.page_table[owner],
            max_seqlen_q=1,
            max_context_len=group.max_context_len,
            num_decodes=count,
            known_lengths=((1,) * count, tuple(lengths.tolist())),
        )
        return alone, None, sample, None, self._budget(group.policy, alone)

    def _choice(self, group: HostGroup, device: torch.device) -> TileChoice:
        parameters: dict[str, Any] = dict(group.policy.parameters)
        [target] = [kind(parameters[name]) for name, kind in _TARGETS.items() if name in parameters]
        [lengths] = upload([group.prompt_lens], device)
        named = parameters["estimator"]
        estimators = {
            layer: _ESTIMATORS[_AUTO[self._rotary[layer]] if named == "auto" else named] for layer in self._chosen
        }
        return TileChoice(target, estimators, lengths, parameters["dense_below"])

    def pairs(self, policy: AttentionPolicy, start: int, end: int) -> float:
        """Pairs that the queries at positions `start` to `end` compute, over all layers, as a mean of the heads."""
        if (budget := policy.decode_budget) is not None and policy.is_decode:
            rest = Counter(mask for index, mask in enumerate(self._own) if index not in self._chosen)
            read = sum(keys_read(position + 1, budget) for position in range(start, end))
            return len(self._chosen) * read + sum(n * _pairs(mask, start, end) for mask, n in rest.items())
        return sum(layers * _pairs(mask, start, end) for mask, layers in Counter(self.masks(policy)).items())

    def use(self, request: Request) -> AttentionUse:
        """What a request's prompt was computed with; takes what was measured of it."""
        policy = request.spec.attention
        dense = self._count(self._own, request)
        tile = (TILE, TILE)
        if policy.is_dynamic:
            seen, dense = self._in_tiles(request, dense)
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

    def decode_use(self, request: Request) -> DecodeUse | None:
        """What a request's answer has read so far under its decode budget; None if it has none."""
        reads = request.reads
        if reads is None:
            return None
        heads = len(self._chosen) * self._shape.num_kv_heads
        numbers = 2 * (reads.keys - reads.read - reads.blocks) * self._shape.head_dim  # of two, a bound has as many
        return DecodeUse(
            policy=request.spec.attention,
            queries=reads.queries,
            keys=heads * reads.keys,
            keys_read=heads * reads.read,
            kv_bytes_saved=heads * numbers * self._shape.dtype.itemsize,
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
        layers = self._chosen
        rest = self._count([mask for index, mask in enumerate(self._own) if index not in layers], request)
        tile_q, tile_k = self._tile
        ends = np.minimum(np.arange(request.cached, request.prompt_tokens, tile_q) + tile_q, request.prompt_tokens)
        everything = int((-(-ends // tile_k)).sum()) * len(layers) * self.heads
        tiles = request.visited * (self.heads // self._shape.num_kv_heads)
        if not _chooses_tiles(request.spec.attention):
            tiles = everything
        # How many pairs causality hides in the chosen tiles is not known on the host: they count as the mean tile does.
        pairs = rest.pairs + round((dense.pairs - rest.pairs) * (tiles / everything if everything else 1.0))
        return TileCount(tiles, pairs), TileCount(everything, dense.pairs)


def _keeps_masks(policy: AttentionPolicy) -> bool:
    """Whether each layer's mask is its own under a policy, keys being chosen or not."""
    return policy == DENSE or policy.is_dynamic or policy.is_decode


def _chooses_tiles(policy: AttentionPolicy) -> bool:
    """Whether tiles of a prompt are chosen. Nothing has to be estimated to choose all of them: a recall of 1 is dense
    attention, for prompts of which only the answers read less."""
    return policy.is_dynamic and dict(policy.parameters).get("recall") != 1


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
