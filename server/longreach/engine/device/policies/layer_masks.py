"""What each layer computes under a request's attention policy; `usage` counts what that leaves out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from longreach_kernels import Mask, PagedBatch
from longreach_kernels.masks.block_rules import for_heads
from longreach_kernels.sparse import (
    Antidiagonal,
    Density,
    Moments,
    Pooled,
    Recall,
    Speedup,
)
from longreach_patches import BlockBudget, MassSample, PageShape, StepGroup, TileChoice, chosen_layers, masks_under

from longreach.engine.device.attended_blocks import observed_layers
from longreach.engine.device.batch_builder import HostBatch, HostGroup
from longreach.engine.device.policies.tile_parts import choice_parts
from longreach.engine.messages import Generate
from longreach.engine.requests.tile_worth import Tiling
from longreach.policies.masks import mask_of
from longreach.policies.values import AttentionPolicy, Dynamic, SparseDecode, StepPolicy
from longreach.sizes import LEAST_TILED_STEP, TILE
from longreach.util.transfer import upload

# Policies come from callers: so many are remembered, with what was made of them.
_REMEMBERED = 64
_TARGETS = {"recall": Recall, "density": Density, "speedup": Speedup}
_ESTIMATORS = {"antidiagonal": Antidiagonal(), "moments": Moments(), "pooled": Pooled()}
# "auto" in layers with rotary positions and without. Rotated keys differ from one to the next, and their mean says
# little; where nothing is rotated a query looks for what a key says, and single keys matter.
_AUTO = {True: "antidiagonal", False: "moments"}


class LayerPolicies:
    """The masks of one model's layers under every policy.

    Layers are numbered among those that attend. `own` are their own masks, `heads` the query heads of each, `shape`
    that of their keys. No policy touches `dense_layers`. `full` layers see everything; in the `chosen` ones of these,
    policies choose keys: of answers in all, of prompts tiles of `tile` (queries, keys) in the `tiled` ones. Of the last
    layer, where it `is_cut`, only rows are computed whose logits are wanted: no tiles are chosen there, and no mass is
    measured. `step_tokens` are the most of a step. `rotary` says of each layer whether it has rotary positions, all if
    it is None. In `observed` layers it can be seen what answers attend to. Where heads are split over ranks, `part` are
    this one's; all that is counted is of all heads.

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
        step_tokens: int = LEAST_TILED_STEP,
        part: range | None = None,
        rotary: Sequence[bool] | None = None,
        is_cut: bool = False,
    ) -> None:
        self.chosen = frozenset(chosen_layers(own, dense_layers))
        self.unmeasured = len(own) - 1 if is_cut else None
        self.tiled = self.chosen - {self.unmeasured}
        self._rotary = [True] * len(own) if rotary is None else rotary
        self.heads = heads
        self._part = range(heads) if part is None else part
        self.own = own
        self.shape = shape
        self.tile = tile
        self._step_tokens = step_tokens
        self._dense_layers = frozenset(layer % len(own) for layer in dense_layers)
        self.full = frozenset(chosen_layers(own))
        # Of several ranks none has the scores of all heads.
        self.observed = observed_layers(self.full) if len(self._part) == heads else frozenset()
        self._known: OrderedDict[StepPolicy, tuple[tuple[Mask, ...], tuple[Mask, ...]]] = OrderedDict()

    @property
    def tiling(self) -> Tiling:
        """How dynamic policies choose tiles, in steps of this model."""
        return Tiling.of(self.tiled, self.tile, self.shape.num_kv_heads, self._step_tokens)

    @property
    def dense_share(self) -> float:
        """Of the layers that see everything, the share that no policy touches."""
        return len(self._dense_layers & self.full) / len(self.full) if self.full else 1.0

    def check(self, spec: Generate) -> None:
        """See whether a request can be computed under its policy.

        Raises:
            ValueError: it cannot; the message is the caller's.
        """
        if spec.attention.is_dynamic:
            self._check_dynamic(spec)
        if spec.places and not (self.observed and spec.attention.answer_sees_all):
            raise ValueError("`return_places`: there is no layer here in which its answer sees all keys")
        try:
            spec.attention.check_bounds(bool(self.shape.bounded))
        except ValueError as error:
            raise ValueError(f"`attention.decode_budget`: {error}") from None
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
        if self.shape.page_size % TILE:
            raise ValueError(
                f"`attention`: dynamic needs KV pages of whole tiles; this server's --page-size is "
                f"{self.shape.page_size}, a multiple of {TILE} would do"
            )
        if self._step_tokens < LEAST_TILED_STEP:
            raise ValueError(
                f"`attention`: dynamic reads a prompt in whole tiles; this server's --max-batched-tokens is "
                f"{self._step_tokens}, {LEAST_TILED_STEP} would do"
            )

    def masks(self, policy: StepPolicy) -> tuple[Mask, ...]:
        """What each layer computes, first to last, where no tiles are chosen."""
        return self._under(policy)[0] if policy.has_mask else self.own

    def narrowed(self, policy: StepPolicy) -> frozenset[int]:
        """The layers whose queries see fewer keys under a static policy than by their own mask."""
        pairs = zip(self.masks(policy), self.own, strict=True)
        return frozenset(index for index, (mask, own) in enumerate(pairs) if mask != own)

    def changed(self, policy: AttentionPolicy) -> frozenset[int]:
        """The layers that compute something else under a request's policy than without, in its prompt or its answer."""
        chosen = self.tiled if policy.chooses_tiles else frozenset()
        return self.narrowed(policy) | (chosen if policy.answer_budget is None else self.chosen)

    def _under(self, policy: StepPolicy) -> tuple[tuple[Mask, ...], tuple[Mask, ...]]:
        """What each layer computes under a static policy, for all heads and for this rank's."""
        if policy not in self._known:
            mask = mask_of(policy)
            everywhere = here = masks_under(mask, self.own, self._dense_layers)
            if mask.heads > 1 and len(self._part) < self.heads:
                here = masks_under(for_heads(mask, self._part, self.heads), self.own, self._dense_layers)
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
            rows = group.tokens.start, group.tokens.stop
            if group.is_empty:
                groups.append(StepGroup(*rows, paged))
                continue
            if isinstance(group.policy, SparseDecode):
                groups.append(StepGroup(*rows, *self._decodes(group, group.policy, batch, paged, sample)))
                continue
            alone = PagedBatch(
                cu_seqlens_q=cu_seqlens_q,
                context_lens=paged.context_lens[group.sequences],
                **paged.tables_of(group.sequences),
                max_seqlen_q=group.max_seqlen_q,
                max_context_len=group.max_context_len,
                num_decodes=group.num_decodes,
                known_lengths=(
                    tuple(np.diff(group.cu_seqlens_q).tolist()),
                    tuple(batch.context_lens[group.sequences].tolist()),
                ),
            )
            policy = group.policy
            masks = None if policy.is_dense else self._own_heads(policy)
            choice = None
            if isinstance(policy, Dynamic) and policy.chooses_tiles:
                choice = self._choice(policy, group, alone)
            groups.append(StepGroup(*rows, alone, masks, sample, choice))
        return tuple(groups)

    def answers(self, policy: StepPolicy, start: int, batch: PagedBatch, *, measured: bool = False) -> StepGroup | None:
        """Answers under a policy as the rows from `start` on of a step that is captured, for this rank's heads; with
        `measured` what each of them keeps within a budget of keys is looked at, too.

        None if a layer needs lists of tiles, which are made on the host.
        """
        rows = start, start + batch.size
        if isinstance(policy, SparseDecode):
            every = torch.arange(batch.size, device=batch.context_lens.device)
            sample = MassSample(every, batch) if measured else None
            return StepGroup(*rows, batch, sample=sample, budget=self._budget(policy, batch))
        if policy.is_dynamic:
            return None
        masks = self._own_heads(policy)
        return None if any(mask.band is None for mask in masks) else StepGroup(*rows, batch, masks)

    def _budget(self, policy: SparseDecode, batch: PagedBatch) -> BlockBudget:
        return BlockBudget(policy.budget, self.chosen, batch, len(self._part), policy.min_mass)

    def _own_heads(self, policy: StepPolicy) -> tuple[Mask, ...]:
        """What each layer computes for this rank's heads."""
        return self._under(policy)[1] if policy.has_mask else self.own

    def _decodes(
        self,
        group: HostGroup,
        policy: SparseDecode,
        batch: HostBatch,
        paged: PagedBatch,
        sample: MassSample | None,
    ) -> tuple[PagedBatch, None, MassSample | None, None, BlockBudget]:
        """Batch, masks, sample, choice and budget of a group that reads a budget of keys.

        Each token is a sequence of its own: keys are chosen for one query, and a token that was drafted, or is computed
        again with others, reads what it would read alone.
        """
        count = group.tokens.stop - group.tokens.start
        owners = np.repeat(np.arange(group.sequences.start, group.sequences.stop), np.diff(group.cu_seqlens_q))
        lengths = (batch.places[group.tokens] + 1).astype(np.int32)
        device = paged.context_lens.device
        [owner] = upload([owners], device)
        starts, lens = upload([np.arange(count + 1, dtype=np.int32), lengths], device)
        alone = PagedBatch(
            cu_seqlens_q=starts,
            context_lens=lens,
            **paged.tables_of(owner),
            max_seqlen_q=1,
            max_context_len=group.max_context_len,
            num_decodes=count,
            known_lengths=((1,) * count, tuple(lengths.tolist())),
        )
        return alone, None, sample, None, self._budget(policy, alone)

    def _choice(self, policy: Dynamic, group: HostGroup, batch: PagedBatch) -> TileChoice:
        given = ((kind, getattr(policy, name)) for name, kind in _TARGETS.items())
        target = next(kind(value) for kind, value in given if value is not None)
        named = policy.estimator
        estimators = {
            layer: _ESTIMATORS[_AUTO[self._rotary[layer]] if named == "auto" else named] for layer in self.tiled
        }
        return TileChoice(target, estimators, policy.dense_below, choice_parts(group, batch), policy.min_mass)
