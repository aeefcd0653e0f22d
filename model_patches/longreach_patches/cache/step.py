"""One forward pass over the pages: what a patched model is handed beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from longreach_kernels import PagedBatch
from longreach_kernels.call import AttentionCall

from longreach_patches.cache.pages import KVPages
from longreach_patches.cache.states import StateStep
from longreach_patches.policy_step import StepGroup, StepMeasurements, StepRecord


class WantedRows(NamedTuple):
    """The rows of a step whose results are wanted: `rows` (R,) int64, ascending, the last ones of each of some of its
    sequences, and those sequences with these queries alone, as `batch`; None if there are none. `groups` are those of
    the step with these rows alone, empty ones included."""

    rows: torch.Tensor
    batch: PagedBatch | None
    groups: tuple[StepGroup, ...] = ()


class KeptQueries(NamedTuple):
    """Queries of one layer, (R, Hq, D), ready for attention, and how the layer attends with them."""

    queries: torch.Tensor
    call: AttentionCall


@dataclass(frozen=True)
class QueryTap:
    """Keeps the queries of some layers of a step, for whoever looks behind the step at what they attend to.

    A captured step that keeps all rows launches nothing for that: their memory is not used again.

    Attributes:
        layers: which layers, numbered among those that attend.
        rows: (R,) int64, of which tokens of the step; None for all.
        kept: what the step has left, by layer, valid until it is computed again.
    """

    layers: frozenset[int]
    rows: torch.Tensor | None = None
    kept: dict[int, KeptQueries] = field(default_factory=dict)

    def take(self, layer: int, queries: torch.Tensor, call: AttentionCall) -> None:
        """Keep what is wanted of a layer's `queries` (T, Hq, D)."""
        if layer in self.layers:
            self.kept[layer] = KeptQueries(queries if self.rows is None else queries[self.rows], call)


@dataclass(frozen=True)
class PagedStep:
    """One forward pass over the pages, handed to a patched model as the keyword argument `paged_step`.

    The model's input is one row of T tokens, the new tokens of all sequences one after another. `slots` (T,) int64
    says where each token's key and value go (-1: nowhere, padding); `batch` says which tokens belong together and where
    their earlier keys lie. `mask_placeholder` must be passed as the model's `attention_mask`.

    Where layers are in several groups, `other_slots` (groups - 1, T) says where keys and values go in those after the
    first, and the batch has their page tables.

    Where sequences differ in how they compute attention, `groups` has all of them, in order, and stands for `batch`.
    The layers note in `record` what they measure of the groups; `measured` has it when the step is computed.

    The last layer computes keys and values of all tokens, and all else for `wanted` only, if that is given: the model
    then gives R rows for T. A model whose layers are not fused refuses it. `unmeasured` is that layer, whether it does
    so in this step or not: of groups without a budget no kept mass is measured there.

    `states` are those of layers that keep one in place of keys and values; None for models without such layers.

    `tap` keeps queries. Where rows are left out in the last layer, its rows have to be the wanted ones.
    """

    pages: KVPages
    batch: PagedBatch
    slots: torch.Tensor
    groups: tuple[StepGroup, ...] = ()
    wanted: WantedRows | None = None
    states: StateStep | None = None
    record: StepRecord = field(default_factory=StepRecord)
    other_slots: torch.Tensor | None = None
    unmeasured: int | None = None
    tap: QueryTap | None = None

    def slots_of(self, layer: int) -> torch.Tensor:
        """(T,) int64, where each token's key and value go in the pages of a layer."""
        group = self.pages.shape.group_of[layer]
        return self.slots if group == 0 or self.other_slots is None else self.other_slots[group - 1]

    def measured(self) -> StepMeasurements:
        """What the layers have measured of each group, once the step is computed."""
        return tuple(self.record.of_group(index).measured() for index in range(len(self.groups)))

    def of_wanted(self) -> PagedStep:
        """The step of the wanted rows alone, of which there must be some."""
        assert self.wanted is not None
        assert self.wanted.batch is not None
        assert len(self.wanted.groups) == len(self.groups), "a group of the step has its place among the wanted rows"
        rows, others = self.wanted.rows, self.other_slots
        return replace(
            self,
            batch=self.wanted.batch,
            slots=self.slots[rows],
            groups=self.wanted.groups,
            other_slots=None if others is None else others[:, rows],
            wanted=None,
            tap=None if self.tap is None else replace(self.tap, rows=None),
        )

    @property
    def mask_placeholder(self) -> torch.Tensor:
        """A 4-D tensor of one element: transformers takes a 4-D mask as ready made and builds none of its own.

        Without it, transformers inspects the position ids for packed sequences, which waits for the GPU. It carries the
        step (`step_behind`): the layers of some families hand on their mask, and not what else they are given.
        """
        mask = self.slots.new_zeros(()).view(1, 1, 1, 1)
        setattr(mask, _STEP, self)
        return mask


_STEP = "longreach_step"


def step_behind(mask: object) -> PagedStep | None:
    """The step whose `mask_placeholder` this is; None for other masks."""
    return getattr(mask, _STEP, None)
