"""CUDA graphs for steps in which prompts are read beside answers, or a short prompt alone.

Launching the kernels of such a step one by one takes the host 25 to 55 ms for a model of 32 layers, as the machine's
mood is: as long as `--max-itl` lets a whole step take, and longer than the GPU needs for a chunk that fits it. So steps
of up to 2,048 rows are captured too, in a few sizes (`step_sizes`). A step is laid out in the smallest that holds it:
the answers' rows first, then the prompts', each with padding behind it that writes nowhere.

Larger steps of prompts alone are captured where that gains something (`large`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_patches import NO_SLOT, KVPages, PagedStep, StateStore

from longreach.engine.device.batch_builder import HostBatch, Int32, Int64
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
from longreach.engine.device.graphs.large import worthwhile
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.step_sizes import ALONE, MOST_BESIDE, SIZES, holding, places_for
from longreach.util.transfer import upload

logger = logging.getLogger(__name__)

PROMPTS = 2  # that a captured step has sequences for


@dataclass(frozen=True)
class Layout:
    """A step of A answers and up to `PROMPTS` prompts as `rows` rows, of which the first A, padded, are the answers'.

    Attributes:
        answers, rows: the size, unused rows included.
        input_ids, positions: (rows,) as in `HostBatch`.
        slots: (groups, rows) as in `HostBatch`, of each group of layers; -1 for what is not there.
        seq_slots: (answers,) those of the requests that answer.
        logit_rows: (answers + PROMPTS,) of the answers' rows, then of the last of each prompt's.
        cu_seqlens_q: (answers + PROMPTS + 1,) where each sequence's tokens start.
        context_lens: (answers + PROMPTS,) as in `HostBatch`, 0 for what is not there.
        sequences: (B,) where the step's sequences stand among these.
        drawn: (R,) which of the logits are those that the step wants, in its order.
    """

    answers: int
    rows: int
    input_ids: Int64
    positions: Int64
    slots: Int64
    seq_slots: Int64
    logit_rows: Int64
    cu_seqlens_q: Int32
    context_lens: Int32
    sequences: Int64
    drawn: Int64


def lay_out(batch: HostBatch) -> Layout | None:
    """Where everything of a step stands in the smallest captured size that holds it; None if none does."""
    count = batch.num_decodes
    prompts = len(batch.seq_slots) - count
    wanted = batch.rows_wanted
    beside = len(batch.input_ids) - count
    answers = 0 if count == 0 and beside + places_for(0) > MOST_BESIDE else places_for(count)
    rows = holding(answers, answers + beside)
    fits = rows is not None and 1 <= prompts <= PROMPTS
    if not fits or batch.groups or wanted.max() > 1:
        return None
    assert rows is not None
    tokens = np.concatenate([np.arange(count), np.arange(answers, answers + beside)])
    sequences = np.concatenate([np.arange(count), np.arange(answers, answers + prompts)]).astype(np.int64)

    def padded(values: np.ndarray, places: np.ndarray, size: int, filling: int = 0) -> np.ndarray:
        result = np.full(size, filling, values.dtype)
        result[places] = values
        return result

    ends = answers + batch.cu_seqlens_q[count + 1 :] - count  # after each prompt's last row
    last = np.full(PROMPTS, ends[-1], np.int32)
    last[:prompts] = ends
    starts: Int32 = np.arange(answers + PROMPTS + 1, dtype=np.int32)
    starts[answers + 1 :] = last
    return Layout(
        answers=answers,
        rows=rows,
        input_ids=padded(batch.input_ids, tokens, rows),
        positions=padded(batch.positions, tokens, rows),
        slots=np.stack([padded(slots, tokens, rows, -1) for slots in batch.all_slots]),
        seq_slots=padded(batch.seq_slots[:count], sequences[:count], answers),
        logit_rows=np.concatenate([np.arange(answers), last - 1]).astype(np.int64),
        cu_seqlens_q=starts,
        context_lens=padded(batch.context_lens, sequences, answers + PROMPTS),
        sequences=sequences,
        drawn=sequences[wanted > 0],
    )


class MixedGraphs:
    """Captured steps that share one set of input tensors and one memory pool.

    Attributes:
        tapped: the queries that the last replay has left, of the rows that its logits are of.
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
        """`run`, `fill`, `needs`, `states` and `observed` as for `DecodeGraphs`."""
        self._observed = observed
        self.tapped: Tapped | None = None
        self._states = states
        self._run = run
        self._fill = fill
        self._pages = pages
        self._context = limits.max_model_len
        self._device = pages.keys[0].device
        self._sizes = sizes(limits, needs)
        self._alone = alone(limits)
        rows = max((rows for _, rows in (*self._sizes, *self._alone)), default=0)
        sequences = max((answers for answers, _ in self._sizes), default=0) + PROMPTS
        groups = len(pages.shape.groups)
        self._long = torch.zeros((2 + groups) * rows + 2 * sequences, dtype=torch.int64, device=self._device)
        # Of each sequence the slot that its state is read from, and the one that it is written to.
        self._state_slots = torch.zeros((2, sequences), dtype=torch.int64, device=self._device)
        self._short = torch.zeros(2 * sequences + 1, dtype=torch.int32, device=self._device)
        places = (groups, sequences, -(-self._context // pages.shape.page_size))
        self._tables = torch.zeros(places, dtype=torch.int32, device=self._device)
        self._captured: dict[tuple[int, int], Captured] = {}

    def close(self) -> None:
        """Let go of all graphs, whatever else may still hold on to this object."""
        self._captured.clear()

    def capture(self, pool: Any) -> None:
        """Capture every size; afterwards no step captures anything."""
        start = time.perf_counter()
        # The largest first, whose memory then does for the others.
        large = worthwhile((rows, self._step(0, rows)) for _, rows in self._alone)
        for rows in reversed(large):
            self._captured[0, rows] = capture(self._step(0, rows), pool)
        for (answers, rows), run in self.steps():
            self._captured[answers, rows] = capture(run, pool)
        if self._captured:
            elapsed = time.perf_counter() - start
            logger.info("captured %d graphs of prompts beside answers in %.1f s", len(self._captured), elapsed)

    def steps(self) -> Iterator[tuple[tuple[int, int], Callable[[], torch.Tensor]]]:
        """What is captured in any case: sizes, and the step of each. It is to be run before the next is taken."""
        for answers, rows in reversed(self._sizes):  # the largest first, whose memory then does for the others
            yield (answers, rows), self._step(answers, rows)

    def replay(self, batch: HostBatch, page_tables: DeviceTables) -> torch.Tensor | None:
        """Run a step and return the logits of the rows that it wants (R, V), valid until the next replay.

        None if no graph holds such a step. The pages of its sequences are in `page_tables`.
        """
        layout = lay_out(batch)
        captured = None if layout is None else self._captured.get((layout.answers, layout.rows))
        if layout is None or captured is None:
            return None
        long = [layout.input_ids, layout.positions, layout.seq_slots, layout.logit_rows, layout.slots.reshape(-1)]
        short = [layout.cu_seqlens_q, layout.context_lens]
        for target, arrays in ((self._long, long), (self._short, short)):
            packed = torch.from_numpy(np.concatenate(arrays)).pin_memory()
            target[: len(packed)].copy_(packed, non_blocking=True)
        if self._states is not None:
            found = np.full((2, len(layout.context_lens)), NO_SLOT, np.int64)
            found[:, layout.sequences] = batch.state_slots
            on_host = torch.from_numpy(found).pin_memory()
            self._state_slots[:, : found.shape[1]].copy_(on_host, non_blocking=True)
        owners, places, drawn = upload([batch.seq_slots, layout.sequences, layout.drawn], self._device)
        of_sequences = page_tables.rows(owners, batch.num_pages)
        self._tables[:, :, : batch.num_pages].index_copy_(1, places, of_sequences)
        captured.graph.replay()
        self.tapped = None if captured.tap is None else Tapped(captured.tap.kept, layout.drawn)
        return captured.logits[drawn]

    def _step(self, answers: int, rows: int) -> TappedRun:
        sequences, groups = answers + PROMPTS, len(self._tables)
        sizes = [rows, rows, answers, sequences, groups * rows]
        input_ids, positions, seq_slots, logit_rows, flat = self._long[: sum(sizes)].split(sizes)
        slots = flat.view(groups, rows)
        cu_seqlens, context_lens = self._short[: 2 * sequences + 1].split([sequences + 1, sequences])
        # One prompt that fills its rows, whose keys all come out of page 0 and go nowhere.
        self._long.zero_()
        slots.fill_(-1)
        positions[answers:] = torch.arange(rows - answers, device=self._device)
        cu_seqlens.copy_(torch.arange(sequences + 1).clamp(max=answers))
        cu_seqlens[answers + 1 :] = rows
        context_lens.zero_()
        context_lens[answers] = min(rows - answers, self._context)
        batch = PagedBatch(
            cu_seqlens_q=cu_seqlens,
            context_lens=context_lens,
            page_table=self._tables[0, :sequences],
            max_seqlen_q=rows - answers,
            max_context_len=self._context,
            num_decodes=answers,
            other_tables=others(self._tables[:, :sequences]),
        )
        states = states_of(self._states, self._state_slots.fill_(NO_SLOT)[:, :sequences], batch)
        tap = tap_of(self._observed, logit_rows)  # all rows of a long step would be much to keep
        step = PagedStep(self._pages, batch, slots[0], states=states, other_slots=others(slots), tap=tap)

        def run() -> torch.Tensor:
            filled = self._fill(input_ids[:answers], seq_slots)
            return self._run(step, torch.cat([filled, input_ids[answers:]]), positions, logit_rows)

        return TappedRun(run, tap)


def alone(limits: Limits) -> list[tuple[int, int]]:
    """No answers, and the rows of the large steps that there can be under these limits."""
    most = min(limits.max_batched_tokens, limits.max_model_len)
    return [(0, rows) for rows in ALONE if rows <= most]


def sizes(limits: Limits, needs: Needs) -> list[tuple[int, int]]:
    """Answers and rows of the steps that are worth a graph under these limits."""
    fewest, *more = SIZES
    most = places_for(limits.max_num_seqs)
    answers = [fewest] + [
        count
        for count in more
        if count <= most and needs(count, limits.max_model_len).workspace_bytes <= MOST_WORKSPACE_BYTES
    ]
    longest = min(limits.max_batched_tokens, limits.max_model_len)
    return [(count, rows) for count in answers for rows in SIZES[count] if rows - count < longest]
