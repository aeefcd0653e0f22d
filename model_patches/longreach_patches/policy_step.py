"""Attention of a step whose sequences do not all compute it alike.

The sequences of one attention policy form a group: neighbours in the step, with a batch of their own and a mask for
every layer. A step without groups is dense, and computed as if there were none of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from longreach_kernels import Causal, Mask, PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.block_rules import within_window
from longreach_kernels.paged_api import paged_attention_call
from longreach_kernels.sizes import KEY_BLOCK
from longreach_kernels.sparse import FloorCounts, block_attention, kept_share, select_blocks
from torch import Tensor

from longreach_patches.tile_choice import ChoiceRecord, TileChoice, chosen_attention

if TYPE_CHECKING:
    from longreach_patches.cache.step import PagedStep

# What choosing blocks may take of memory at once: for each query head about so many bytes a block (its logit, the
# weight of what is skipped, and what is made on the way).
SELECTION_BYTES = 128 << 20
_BLOCK_BYTES = 24


@dataclass(frozen=True)
class MassSample:
    """Some of a group's queries, of which is measured what part of the dense attention's mass they keep.

    Attributes:
        rows: (R,) int64, which rows of the group's queries.
        batch: the R queries as sequences of one query each, whose keys end at their own.
    """

    rows: Tensor
    batch: PagedBatch


@dataclass(frozen=True)
class BlockBudget:
    """Keys that are chosen for each query of decodes, as `longreach_kernels.sparse.select_blocks` does.

    Attributes:
        tokens: how many keys each KV head reads at most.
        layers: where they are chosen, all of which keep bounds; the other layers compute their own masks.
        batch: the group's, of one query a sequence.
        heads: query heads of a layer.
        floor: the share of dense attention's mass that a query keeps for certain, or else reads every key, in all heads
            of a layer; None for none.
    """

    tokens: int
    layers: frozenset[int]
    batch: PagedBatch
    heads: int
    floor: float | None = None

    @cached_property
    def parts(self) -> tuple[tuple[slice, PagedBatch], ...]:
        """Runs of sequences that are few enough for `SELECTION_BYTES`, each as a batch."""
        whole = self.batch
        blocks = -(-max(1, whole.max_context_len) // KEY_BLOCK)
        count = max(1, SELECTION_BYTES // (_BLOCK_BYTES * self.heads * blocks))
        return tuple(
            (
                run := slice(start, min(start + count, whole.size)),
                PagedBatch(
                    whole.cu_seqlens_q[: run.stop - start + 1],
                    whole.context_lens[run],
                    **whole.tables_of(run),
                    max_seqlen_q=1,
                    max_context_len=whole.max_context_len,
                ),
            )
            for start in range(0, whole.size, count)
        )


@dataclass(frozen=True)
class StepGroup:
    """Rows ``start <= row < end`` of a step's tokens, which are those of `batch`'s sequences.

    `masks` has what each layer computes, first to last; None stands for the layers' own, but for those where tiles are
    the `choice`'s or keys the `budget`'s. `sample` says which queries are measured.
    """

    start: int
    end: int
    batch: PagedBatch
    masks: tuple[Mask, ...] | None = None
    sample: MassSample | None = None
    choice: TileChoice | None = None
    budget: BlockBudget | None = None


class GroupMeasurements(NamedTuple):
    """What a step has measured of one of its groups; None for what there was nothing to measure of.

    Attributes:
        kept: (R, layers, Hq) fp32, of each query of the group's `sample` the part of the dense attention's mass that it
            kept, in each layer that the policy changes.
        visited: (layers, S) int32, the key tiles that were chosen, as `ChoiceRecord.visited`.
        visited_layers: which layers these are.
        missed: (layers, B, Hq) fp32, an upper bound of the share of attention that each query missed, in each layer of
            the group's `budget`.
        whole: (layers, B) bool, where a query read every key, since its budget did not keep the floor for certain.
        floor: what the tests of drawn queries found, as `ChoiceRecord.tested`.
    """

    kept: Tensor | None = None
    visited: Tensor | None = None
    missed: Tensor | None = None
    visited_layers: tuple[int, ...] = ()
    whole: Tensor | None = None
    floor: tuple[tuple[int, int, FloorCounts], ...] = ()


StepMeasurements = tuple[GroupMeasurements, ...]  # of a step's groups, in order


@dataclass(eq=False)
class GroupRecord:
    """What the layers of a step note about one group, each in its turn: lists of what `GroupMeasurements` has."""

    kept: list[Tensor] = field(default_factory=list)
    missed: list[Tensor] = field(default_factory=list)
    whole: list[Tensor] = field(default_factory=list)
    choice: ChoiceRecord = field(default_factory=ChoiceRecord)

    def measured(self) -> GroupMeasurements:
        """What has been measured in all layers together."""
        visited = self.choice.visited
        return GroupMeasurements(
            kept=torch.stack(self.kept, 1) if self.kept else None,
            visited=torch.stack(list(visited.values())) if visited else None,
            missed=torch.stack(self.missed) if self.missed else None,
            visited_layers=tuple(visited),
            whole=torch.stack(self.whole) if self.whole else None,
            floor=self.choice.tested,
        )


class StepRecord:
    """The notes of a step's layers about its groups. `step_attention` alone adds to them."""

    def __init__(self) -> None:
        self._groups: defaultdict[int, GroupRecord] = defaultdict(GroupRecord)

    def of_group(self, index: int) -> GroupRecord:
        """The notes about a group, by its place in the step."""
        return self._groups[index]


def chosen_layers(own: tuple[Mask, ...], dense_layers: Collection[int] = ()) -> tuple[int, ...]:
    """The layers in which keys may be chosen: those that see everything, but for `dense_layers` (-1 is the last).
    Layers are numbered among those that attend.

    Raises:
        ValueError: there is no such layer; the message names the server's flag.
    """
    wrong = [layer for layer in dense_layers if not -len(own) <= layer < len(own)]
    if wrong:
        raise ValueError(
            f"--attention-dense-layers counts the layers that attend, of which the model has {len(own)}: 0 to "
            f"{len(own) - 1}, or -{len(own)} to -1 from their end; there is no layer {wrong[0]}"
        )
    dense = {layer % len(own) for layer in dense_layers}
    return tuple(index for index, mask in enumerate(own) if mask.band == Causal().band and index not in dense)


def masks_under(policy: Mask, own: tuple[Mask, ...], dense_layers: frozenset[int] = frozenset()) -> tuple[Mask, ...]:
    """What each layer of a model computes under a policy: its own mask where that is tighter, what both let through
    where neither is, and its own alone in `dense_layers`."""
    return tuple(mask if index in dense_layers else within_window(mask, policy) for index, mask in enumerate(own))


def step_attention(q: Tensor, layer_index: int, step: PagedStep, call: AttentionCall, backend: str) -> Tensor:
    """Attention of one layer over its pages for all groups of a step.

    Args:
        q: (T, Hq, D), the queries of the whole step.
        layer_index: which layer.
        step: the step; its keys must be in their pages already.
        call: what the layer computes by itself: its own mask, and scales.
        backend: as `longreach_kernels.paged_attention` takes it.

    Returns:
        (T, Hq, D), contiguous.
    """
    pages = step.pages.keys[layer_index], step.pages.values[layer_index]
    of_layer = step.pages.shape.group_of[layer_index]
    if step.tap is not None:
        step.tap.take(layer_index, q, call)
    if not step.groups:
        return paged_attention_call(q, *pages, step.batch.of_group(of_layer), call, backend)[0]
    parts = []
    for index, group in enumerate(step.groups):
        if group.start == group.end:
            continue  # nothing of it is wanted
        record = step.record.of_group(index)
        queries = q[group.start : group.end]
        sample = group.sample if group.budget is not None or layer_index != step.unmeasured else None
        if group.budget is not None and layer_index in group.budget.layers:
            out, lse, missed = _within_budget(queries, layer_index, step, group.budget, call, backend, record)
            record.missed.append(missed)
            is_own = False
        elif group.choice is not None and layer_index in group.choice.estimators:
            out, lse = chosen_attention(queries, layer_index, step, group.choice, record.choice, call, backend)
            is_own = False
            if sample is not None and group.choice.is_dense(layer_index):
                record.kept.append(queries.new_ones((len(sample.rows), q.shape[1]), dtype=torch.float32))
                sample = None
        else:
            mask = call.mask if group.masks is None else group.masks[layer_index]
            is_own = mask == call.mask
            seen = call if is_own else replace(call, mask=mask)
            out, lse = paged_attention_call(queries, *pages, group.batch.of_group(of_layer), seen, backend)
        if sample is not None and not is_own:
            record.kept.append(_kept(queries, lse, layer_index, step, sample, call, backend))
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _within_budget(
    q: Tensor,
    layer_index: int,
    step: PagedStep,
    budget: BlockBudget,
    call: AttentionCall,
    backend: str,
    record: GroupRecord,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of decodes to the keys that are chosen for each, its log-sum-exp, and a bound of what each missed.

    Where the bound of a query does not promise the budget's floor, it reads all keys.
    """
    pages = step.pages.keys[layer_index], step.pages.values[layer_index]
    bounds = step.pages.bounds[layer_index]
    assert bounds is not None, f"layer {layer_index} keeps no bounds"
    k_scale, v_scale = call.kv_scales or (None, None)
    of_layer = step.pages.shape.group_of[layer_index]
    found = []
    for rows, part in budget.parts:
        batch = part.of_group(of_layer)
        of_choice = {"scale": call.scale, "softcap": call.softcap, "k_scale": k_scale, "backend": backend}
        choice = select_blocks(q[rows], bounds, batch, budget=budget.tokens, **of_choice)
        out, lse = block_attention(
            q[rows], *pages, batch, choice, sink_logits=call.sink_logits, v_scale=v_scale, **of_choice
        )
        missed = choice.missed(lse)
        if budget.floor is None:
            found.append((out, lse, missed))
            continue
        whole = missed.amax(1) > 1 - budget.floor
        # The others have no keys in this call, and cost next to nothing; the host need not know which they are.
        asked = replace(batch, context_lens=torch.where(whole, batch.context_lens, 0), known_lengths=None)
        all_out, all_lse = paged_attention_call(q[rows], *pages, asked, call, backend)
        out = torch.where(whole[:, None, None], all_out, out)
        lse = torch.where(whole[:, None], all_lse, lse)
        found.append((out, lse, torch.where(whole[:, None], 0.0, missed), whole))
    out, lse, missed, *whole = found[0] if len(found) == 1 else (torch.cat(parts) for parts in zip(*found, strict=True))
    record.whole += whole
    return out, lse, missed


def _kept(
    q: Tensor,
    lse: Tensor,
    layer_index: int,
    step: PagedStep,
    sample: MassSample,
    call: AttentionCall,
    backend: str,
) -> Tensor:
    """The part of the dense softmax's mass on the keys that were seen, exactly."""
    pages = step.pages.keys[layer_index], step.pages.values[layer_index]
    batch = sample.batch.of_group(step.pages.shape.group_of[layer_index])
    _, dense = paged_attention_call(q[sample.rows], *pages, batch, call, backend)
    return kept_share(lse[sample.rows], dense)
