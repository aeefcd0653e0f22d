"""CUDA graphs for steps in which every sequence computes one token.

Such a step is hundreds of tiny kernels; launching them one by one costs several times what they compute. A graph is
captured once for each pair of (number of sequences, longest context) out of a few, and a step replays the smallest that
holds it, its unused rows padded with sequences of length 0. Where kernels go by the sequences' own lengths there is one
context, the longest.

Steps that read prompts beside answers have graphs of their own (`mixed`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_patches import KVPages, PagedStep, StateStore

from longreach.engine.device.batch_builder import HostBatch
from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.device.graphs.capture import (
    MOST_WORKSPACE_BYTES,
    Captured,
    Fill,
    Forward,
    Needs,
    Tapped,
    TappedRun,
    capture,
    others,
    states_of,
    tap_of,
)
from longreach.engine.scheduling.limits import Limits

logger = logging.getLogger(__name__)

_SMALLEST_CONTEXT = 8192
_CONTEXT_FACTOR = 4


class DecodeGraphs:
    """Captured decode steps that share one set of input tensors and one memory pool.

    Attributes:
        tapped: the queries that the last replay has left.
    """

    def __init__(
        self,
        run: Forward,
        fill: Fill,
        pages: KVPages,
        needs: Needs,
        limits: Limits,
        states: StateStore | None = None,
        observed: frozenset[int] = frozenset(),
    ) -> None:
        """`run` is the forward pass; `fill` puts in tokens that the host does not know when it fills the inputs;
        `states` are those of layers that keep some; the queries of `observed` layers are kept."""
        self._observed = observed
        self.tapped: Tapped | None = None
        max_num_seqs, max_model_len = limits.max_num_seqs, limits.max_model_len
        self._run = run
        self._fill = fill
        self._pages = pages
        self._states = states
        self._sizes = _powers_up_to(max_num_seqs)
        self._needs = needs
        self._contexts = contexts_for(needs, max_model_len)
        self._device = pages.keys[0].device
        page_size = pages.shape.page_size
        # One row of int64 per kind, slots by group of layers and those of states last, and int32 lengths: a step is two
        # copies, however long the sequences are.
        self._groups = len(pages.shape.groups)
        kinds = 3 + self._groups + (0 if states is None else 2)
        self._long = torch.zeros((kinds, max_num_seqs), dtype=torch.int64, device=self._device)
        self._lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=self._device)
        self._cu_seqlens = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=self._device)
        self._rows = torch.arange(max_num_seqs, device=self._device)
        self._tables = {
            context: self._lens.new_zeros((self._groups, max_num_seqs, -(-context // page_size)))
            for context in self._contexts
        }
        self._captured: dict[tuple[int, int], Captured] = {}

    def close(self) -> None:
        """Let go of all graphs, whatever else may still hold on to this object."""
        self._captured.clear()

    def capture(self, pool: Any) -> None:
        """Capture every pair of sizes; afterwards no step captures anything."""
        start = time.perf_counter()
        for key, run in self.steps():
            self._captured[key] = capture(run, pool)
        logger.info(
            "captured %d decode graphs in %.1f s (batch %s; context %s)",
            len(self._captured),
            time.perf_counter() - start,
            self._sizes,
            self._contexts,
        )

    def steps(self) -> Iterator[tuple[tuple[int, int], Callable[[], torch.Tensor]]]:
        """What is captured: pairs of sizes, and the step of each, which reads padding and writes nothing."""
        self._long.zero_()
        self._long[3:].fill_(-1)
        self._lens.zero_()
        # Largest first: the smaller ones then fit into the memory that the pool already has.
        for size in reversed(self._sizes):
            for context in reversed(self._contexts):
                if size == 1 or self._needs(size, context).workspace_bytes <= MOST_WORKSPACE_BYTES:
                    yield (size, context), self._step(size, context)

    def replay(self, batch: HostBatch, page_tables: DeviceTables) -> torch.Tensor | None:
        """Run one decode step of B sequences and return its logits (B, V), valid until the next replay.

        None if no graph holds such a step. The pages of its sequences are in `page_tables`.
        """
        count = len(batch.context_lens)
        size = next((size for size in self._sizes if size >= count), None)  # with drafts there may be more of them
        context = next(context for context in self._contexts if context >= batch.max_context_len)
        captured = None if size is None else self._captured.get((size, context))
        if size is None or captured is None:
            return None
        long = np.zeros((len(self._long), size), np.int64)
        long[3:, count:] = -1  # padding reads no state, and writes nowhere
        long[:, :count] = batch.input_ids, batch.positions, batch.seq_slots, *batch.all_slots, *batch.state_slots
        lens = np.zeros(size, np.int32)
        lens[:count] = batch.context_lens
        self._long[:, :size].copy_(torch.from_numpy(long).pin_memory(), non_blocking=True)
        self._lens[:size].copy_(torch.from_numpy(lens).pin_memory(), non_blocking=True)
        rows = page_tables.rows(self._long[2, :count], batch.num_pages)
        self._tables[context][:, :count, : batch.num_pages].copy_(rows)
        captured.graph.replay()
        self.tapped = None if captured.tap is None else Tapped(captured.tap.kept)
        return captured.logits[:count]

    def _step(self, size: int, context: int) -> TappedRun:
        batch = PagedBatch(
            cu_seqlens_q=self._cu_seqlens[: size + 1],
            context_lens=self._lens[:size],
            page_table=self._tables[context][0, :size],
            max_seqlen_q=1,
            max_context_len=context,
            num_decodes=size,
            other_tables=others(self._tables[context][:, :size]),
        )
        slots, of_states = self._long[3:, :size].split([self._groups, len(self._long) - 3 - self._groups])
        states = states_of(self._states, of_states, batch)
        tap = tap_of(self._observed)
        step = PagedStep(self._pages, batch, slots[0], states=states, other_slots=others(slots), tap=tap)

        def run() -> torch.Tensor:
            input_ids = self._fill(self._long[0, :size], self._long[2, :size])
            return self._run(step, input_ids, self._long[1, :size], self._rows[:size])

        return TappedRun(run, tap)


def _powers_up_to(bound: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < bound:
        sizes.append(min(sizes[-1] * 2, bound))
    return sizes


def contexts_for(needs: Needs, max_model_len: int) -> list[int]:
    """The contexts that graphs are captured for, ascending: the longest that there can be, and others below it if to
    allow for it takes time."""
    contexts = [max_model_len]
    while not needs(1, max_model_len).by_length and contexts[-1] > _SMALLEST_CONTEXT:
        contexts.append(max(contexts[-1] // _CONTEXT_FACTOR, _SMALLEST_CONTEXT))
    return contexts[::-1]
