"""Attention of a prompt's chunks whose key tiles are chosen in the step, where that is worth what it costs.

A group's rows are cut into parts. In each part a layer either chooses its tiles or, where that does not pay, computes
dense attention. A few queries of a dense part may be probed: their tiles are chosen and counted, and nothing else, so
that later parts know whether choosing has come to pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from longreach_kernels import PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.paged_api import paged_attention_call
from longreach_kernels.sparse import (
    Estimator,
    FloorCounts,
    MassFloor,
    Target,
    TilePlan,
    choose_above,
    choose_tiles,
    plan_tiles,
)
from torch import Tensor

if TYPE_CHECKING:
    from longreach_patches.cache.step import PagedStep


@dataclass(frozen=True)
class TileProbe:
    """Queries from row `start` of a group to the end of their part, as the one sequence of `batch`.

    In `layers` it is counted how many of their tiles would be chosen; `far` (1,) int32 is a length that they are all
    far from the end of.
    """

    start: int
    batch: PagedBatch
    layers: frozenset[int]
    far: Tensor


@dataclass(frozen=True)
class ChoicePart:
    """Rows ``start <= row < end`` of a group, which are those of `batch`'s sequences.

    Attributes:
        prompt_lens: (B,) int32, tokens of each sequence's prompt.
        dense: layers that compute dense attention in place of a choice.
        unknown: (B,) int32 zeros, which stand for what is not counted.
        probe: queries that are looked at in some of the dense layers; the part has one sequence then.
    """

    start: int
    end: int
    batch: PagedBatch
    prompt_lens: Tensor
    dense: frozenset[int]
    unknown: Tensor
    probe: TileProbe | None = None


@dataclass(frozen=True)
class TileChoice:
    """Key tiles that are chosen in the step, as `longreach_kernels.sparse.choose_tiles` does.

    Attributes:
        target: how much is kept.
        estimators: by which estimate, for each layer where tiles are chosen; the other layers compute their own masks.
        dense_below: queries before this position see everything.
        parts: all rows of the group, in order.
        floor: what a drawn query keeps at least of dense attention's mass, or None.
    """

    target: Target
    estimators: Mapping[int, Estimator]
    dense_below: int
    parts: tuple[ChoicePart, ...]
    floor: float | None = None

    def is_dense(self, layer_index: int) -> bool:
        """Whether nothing is chosen in a layer."""
        return all(layer_index in part.dense for part in self.parts)


@dataclass(eq=False)
class ChoiceRecord:
    """What the layers of a step note about a group's choice.

    Attributes:
        visited: by layer, (S,) int32 for the sequences of all parts: the tiles that were chosen over query tiles and KV
            heads, those of the probe where there is one, and 0 for other dense parts.
        plans: what layers make for those after them, by the part, and the shapes of queries and pages and the group of
            layers.
        floors: by part, the number of its first sequence and of its sequences, and what the tests of drawn queries have
            found in its slots, layer by layer.
    """

    visited: dict[int, Tensor] = field(default_factory=dict)
    plans: dict[tuple[int, bool, torch.Size, torch.Size, int], TilePlan] = field(default_factory=dict)
    floors: dict[int, tuple[int, int, list[FloorCounts]]] = field(default_factory=dict)

    @property
    def tested(self) -> tuple[tuple[int, int, FloorCounts], ...]:
        """As `floors`, over layers."""
        return tuple(
            (
                first,
                size,
                FloorCounts(
                    torch.stack([one.counts for one in found]).sum(0),
                    torch.stack([one.least for one in found]).amin(0),
                    found[0].tile_q,
                ),
            )
            for first, size, found in self.floors.values()
        )


def chosen_attention(
    q: Tensor,
    layer_index: int,
    step: PagedStep,
    choice: TileChoice,
    record: ChoiceRecord,
    call: AttentionCall,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Attention of one of the choice's layers, q (T, Hq, D) being the queries of its group.

    Returns:
        (T, Hq, D) and the log-sum-exp (T, Hq).
    """
    pages = step.pages.keys[layer_index], step.pages.values[layer_index]
    of_layer = step.pages.shape.group_of[layer_index]
    found, counts = [], []
    for index, part in enumerate(choice.parts):
        given = layer_index, step, choice, record, call, backend
        rows, lists, count = q[part.start : part.end], None, part.unknown
        if layer_index not in part.dense:
            lists = _choose(rows, index, *given)
            count = _counted(lists)
        elif part.probe is not None and layer_index in part.probe.layers:
            count = _counted(_choose(q[part.probe.start : part.end], index, *given, probe=part.probe))
        seen = call if lists is None else replace(call, lists=lists)
        found.append(paged_attention_call(rows, *pages, part.batch.of_group(of_layer), seen, backend))
        counts.append(count)
    record.visited[layer_index] = counts[0] if len(counts) == 1 else torch.cat(counts)
    if len(found) == 1:
        return found[0]
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return out, lse


def _choose(
    q: Tensor,
    part_index: int,
    layer_index: int,
    step: PagedStep,
    choice: TileChoice,
    record: ChoiceRecord,
    call: AttentionCall,
    backend: str,
    *,
    probe: TileProbe | None = None,
) -> TileLists:
    """The lists of what is chosen for the queries of a part, or of its probe."""
    k_pages, of_layer = step.pages.keys[layer_index], step.pages.shape.group_of[layer_index]
    part = choice.parts[part_index]
    kind = part_index, probe is not None, q.shape, k_pages.shape, of_layer
    if kind not in record.plans:
        batch, lens, below = part.batch, part.prompt_lens, choice.dense_below
        if probe is not None:
            batch, lens, below = probe.batch, probe.far, 0
        record.plans[kind] = plan_tiles(
            q, k_pages, batch.of_group(of_layer), prompt_lens=lens, dense_below=below, backend=backend
        )
    how = {
        "target": choice.target,
        "estimator": choice.estimators[layer_index],
        "scale": call.scale,
        "softcap": call.softcap,
        "k_scale": None if call.kv_scales is None else call.kv_scales[0],
        "backend": backend,
    }
    plan = record.plans[kind]
    if choice.floor is None:
        return choose_tiles(q, k_pages, plan, **how)
    floor = MassFloor(choice.floor, layer_index)
    lists, found = choose_above(q, k_pages, plan, floor, sink_logits=call.sink_logits, **how)
    if probe is None:  # what a probe counts is not computed, and promises nothing
        first = sum(one.batch.size for one in choice.parts[:part_index])
        record.floors.setdefault(part_index, (first, part.batch.size, []))[2].append(found)
    return lists


def _counted(lists: TileLists) -> Tensor:
    """(B,) int32: the tiles in the lists of each sequence."""
    first = lists.first_row.long()
    after = torch.cat([first[1:], first.new_full((1,), len(lists.start) - 1)])
    return lists.start[after] - lists.start[first]
