"""Attention of a step whose sequences do not all compute it alike.

The sequences of one attention policy form a group: neighbours in the step, with a batch of their own and a mask for
every layer. A step without groups is dense, and computed as if there were none of this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from longreach_kernels import Mask, PagedBatch, paged_attention
from longreach_kernels.block_rules import within_window
from longreach_kernels.dynamic import Estimator, Target, kept_share, select_tiles
from longreach_kernels.tile_lists import TileLists
from torch import Tensor

if TYPE_CHECKING:
    from .pages import PagedStep


@dataclass(frozen=True)
class MassSample:
    """Some of a group's queries, of which is measured what part of the dense attention's mass they keep.

    Attributes:
        rows: (R,) int64, which rows of the group's queries.
        batch: the R queries as sequences of one query each, whose keys end at their own.
        kept: for each layer that the policy changes, the part (R, Hq), fp32; filled by the step.
    """

    rows: Tensor
    batch: PagedBatch
    kept: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class TileChoice:
    """Key tiles that are chosen in the step, as `longreach_kernels.dynamic.select_tiles` does.

    Attributes:
        target, estimator: how much is kept, and by which estimate.
        prompt_lens: (B,) int32, tokens of each sequence's prompt.
        layers: where tiles are chosen; the other layers compute their own masks.
        visited: for each of these layers, (B,) the key tiles of each sequence, over its query tiles and KV heads;
            filled by the step.
    """

    target: Target
    estimator: Estimator
    prompt_lens: Tensor
    layers: frozenset[int]
    visited: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class StepGroup:
    """Rows ``start <= row < end`` of a step's tokens, which are those of `batch`'s sequences.

    `masks` has what each layer computes, first to last; None stands for the layers' own, but for those where tiles are
    the `choice`'s. `sample` says which queries are measured.
    """

    start: int
    end: int
    batch: PagedBatch
    masks: tuple[Mask, ...] | None = None
    sample: MassSample | None = None
    choice: TileChoice | None = None


def masks_under(policy: Mask, own: tuple[Mask, ...], dense_layers: frozenset[int] = frozenset()) -> tuple[Mask, ...]:
    """What each layer of a model computes under a policy: its own mask where that is tighter, what both let through
    where neither is, and its own alone in `dense_layers`."""
    return tuple(mask if index in dense_layers else within_window(mask, policy) for index, mask in enumerate(own))


def step_attention(q: Tensor, layer_index: int, own: Mask, step: PagedStep, **options: Any) -> Tensor:
    """Attention of one layer over its pages for all groups of a step.

    Args:
        q: (T, Hq, D), the queries of the whole step.
        layer_index: which layer.
        own: the layer's own mask.
        step: the step; its keys must be in their pages already.
        options: as `longreach_kernels.paged_attention` takes them.

    Returns:
        (T, Hq, D), contiguous.
    """
    pages = step.pages.keys[layer_index], step.pages.values[layer_index]
    if not step.groups:
        return paged_attention(q, *pages, step.batch, own, **options)
    parts = []
    for group in step.groups:
        mask = own if group.masks is None else group.masks[layer_index]
        queries = q[group.start : group.end]
        seen: dict[str, Any] = {"mask": mask}
        if group.choice is not None and layer_index in group.choice.layers:
            seen = {"lists": _choose(queries, pages[0], group, group.choice, options)}
        elif mask == own or group.sample is None:
            parts.append(paged_attention(queries, *pages, group.batch, mask, **options))
            continue
        if group.sample is None:
            parts.append(paged_attention(queries, *pages, group.batch, **seen, **options))
            continue
        out, lse = paged_attention(queries, *pages, group.batch, **seen, return_lse=True, **options)
        group.sample.kept.append(_kept(queries, lse, pages, own, group.sample, options))
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _choose(q: Tensor, k_pages: Tensor, group: StepGroup, choice: TileChoice, options: dict[str, Any]) -> TileLists:
    lists = select_tiles(
        q,
        k_pages,
        group.batch,
        target=choice.target,
        estimator=choice.estimator,
        prompt_lens=choice.prompt_lens,
        scale=options["scale"],
        k_scale=options["k_scale"],
        backend=options["backend"],
    )
    first = lists.first_row.long()
    after = torch.cat([first[1:], first.new_full((1,), len(lists.start) - 1)])
    choice.visited.append(lists.start[after] - lists.start[first])
    return lists


def _kept(
    q: Tensor, lse: Tensor, pages: tuple[Tensor, Tensor], own: Mask, sample: MassSample, options: dict[str, Any]
) -> Tensor:
    """The part of the dense softmax's mass on the keys that were seen, exactly."""
    _, dense = paged_attention(q[sample.rows], *pages, sample.batch, own, return_lse=True, **options)
    return kept_share(lse[sample.rows], dense)
