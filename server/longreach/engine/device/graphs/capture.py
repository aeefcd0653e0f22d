"""The capture of one step in a CUDA graph, and what all kinds of captured steps share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from longreach_kernels import DecodeNeeds, PagedBatch
from longreach_kernels.delta import StateBatch
from longreach_patches import KeptQueries, PagedStep, QueryTap, StateStep, StateStore

from longreach.engine.device.batch_builder import Int64

# (step, input ids, positions, rows) -> logits; the next is (input ids, sequence slots) -> input ids
Forward = Callable[[PagedStep, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Fill = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Needs = Callable[[int, int], DecodeNeeds]  # of so many sequences with contexts up to a length

# What a graph may keep for partial results of its decodes: a part of what is left for graphs when pages are sized. The
# kernels of sm_90 need less for any batch; others have places for the longest that each sequence could be.
MOST_WORKSPACE_BYTES = 1 << 28


def others(of_groups: torch.Tensor) -> torch.Tensor | None:
    """What a batch or a step has of the groups of layers after the first, (groups - 1, ...); None if there are none."""
    return of_groups[1:] if len(of_groups) > 1 else None


@dataclass(frozen=True)
class Captured:
    """A graph, the tensor that a replay leaves its logits in, and what keeps some of its queries."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tap: QueryTap | None = None


class Tapped(NamedTuple):
    """The queries that a step has left, by layer, and which of them stand for the rows of its logits, in order; None
    where they are the same."""

    kept: Mapping[int, KeptQueries]
    rows: Int64 | None = None


@dataclass(frozen=True)
class TappedRun:
    """A step that can be run, and what keeps some of its queries."""

    run: Callable[[], torch.Tensor]
    tap: QueryTap | None

    def __call__(self) -> torch.Tensor:
        return self.run()


def tap_of(layers: frozenset[int], rows: torch.Tensor | None = None) -> QueryTap | None:
    """What keeps the queries of these layers, if there are any."""
    return QueryTap(layers, rows) if layers else None


def capture(run: Callable[[], torch.Tensor], pool: Any) -> Captured:
    """Run a step once, which initialises libraries, and capture it.

    Raises:
        KernelsMissingError: as `forward_pass.forward`; nothing is captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask the device something meanwhile: NCCL's own, and those that load kernels beside steps.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        logits = run()
    return Captured(graph, logits, run.tap if isinstance(run, TappedRun) else None)


def states_of(store: StateStore | None, slots: torch.Tensor, batch: PagedBatch) -> StateStep | None:
    """The states of a captured step: `slots` (2, B) are those that are read, and those that are written."""
    if store is None:
        return None
    read, write = slots
    of_states = StateBatch(batch.cu_seqlens_q, read, write, batch.max_seqlen_q, batch.num_decodes)
    return StateStep(store, of_states)
