"""Attention of a step whose sequences do not all compute it alike.

The sequences of one attention policy form a group: neighbours in the step, with a batch of their own and a mask for
every layer. A step without groups is dense, and computed as if there were none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from longreach_kernels import Mask, PagedBatch, paged_attention
from longreach_kernels.block_rules import within_window
from torch import Tensor

if TYPE_CHECKING:
    from .pages import PagedStep


@dataclass(frozen=True)
class StepGroup:
    """Rows ``start <= row < end`` of a step's tokens, which are those of `batch`'s sequences.

    `masks` has what each layer computes, first to last; None stands for the layers' own.
    """

    start: int
    end: int
    batch: PagedBatch
    masks: tuple[Mask, ...] | None = None


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
        parts.append(paged_attention(q[group.start : group.end], *pages, group.batch, mask, **options))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
