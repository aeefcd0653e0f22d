"""CUDA graphs for answers under attention policies: windows, with and without sinks, and budgets of keys.

Which policies answer beside each other, and how many of each, is known only when they do. So such a step is launched
kernel by kernel at first, and captured when the same combination has come a few times. The rows of each policy are
padded to a power of two, so that not every request that comes or ends makes another combination.

What a budget has missed is left by each replay; what it has kept is measured by a second graph of the combination,
which reads all keys of all its answers, in the steps in which it is some answer's turn.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_patches import KVPages, PagedStep, StateStore, StepGroup
from torch import distributed

from longreach.engine.device.batch_builder import HostBatch, Int64
from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.device.graphs.capture import (
    MOST_WORKSPACE_BYTES,
    Captured,
    Fill,
    Forward,
    Needs,
    Tapped,
    capture,
    others,
    states_of,
    tap_of,
)
from longreach.engine.device.graphs.decode import contexts_for
from longreach.engine.device.policies.mass_samples import is_sampled
from longreach.engine.scheduling.limits import Limits
from longreach.policies.values import SparseDecode, StepPolicy
from longreach.util.transfer import upload

logger = logging.getLogger(__name__)

# Capturing a step takes as long as two or three of them do kernel by kernel.
STEPS_BEFORE = 4
# Rows of all graphs that are kept, for each of which its graph keeps the logits; and combinations that are counted.
MOST_ROWS = 256
_REMEMBERED = 64
# Keys are chosen out of as many as a graph's context has, however long the answers are: contexts of factors of two.
_SMALLEST_CHOICE = 8192


class Answers(Protocol):
    """As `LayerPolicies.answers`."""

    def __call__(
        self, policy: StepPolicy, start: int, batch: PagedBatch, *, measured: bool = False
    ) -> StepGroup | None: ...


class Replayed(NamedTuple):
    """The logits of a captured step, the step that has measured its groups if it has any, and the queries that it has
    left: valid until the next replay."""

    logits: torch.Tensor
    step: PagedStep | None = None
    tapped: Tapped | None = None


@dataclass(frozen=True)
class Layout:
    """A step of B answers as rows, those of each policy padded to a power of two.

    Attributes:
        groups: the policies, in order, and the rows of each.
        places: (B,) the rows of the step's sequences.
    """

    groups: tuple[tuple[StepPolicy, int], ...]
    places: Int64

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(size for _, size in self.groups)

    @property
    def chooses_keys(self) -> bool:
        """Whether answers among them read a budget of keys."""
        return any(isinstance(policy, SparseDecode) for policy, _ in self.groups)


def lay_out(batch: HostBatch) -> Layout | None:
    """Where the sequences of a step stand; None if they do not all write answers."""
    if not batch.groups or not batch.is_decode_only:
        return None
    groups, places, start = [], [], 0
    for group in batch.groups:
        lengths = batch.context_lens[group.sequences]
        if not group.policy.is_dense and (lengths <= group.prompt_lens).any():
            return None  # at a prompt's last token is measured what its policy keeps
        size = 1 << (len(lengths) - 1).bit_length()
        groups.append((group.policy, size))
        places.append(np.arange(start, start + len(lengths)))
        start += size
    return Layout(tuple(groups), np.concatenate(places))


def _is_measured(batch: HostBatch) -> bool:
    """Whether it is the turn of an answer to have measured what its budget keeps."""
    return any(
        isinstance(group.policy, SparseDecode)
        and is_sampled(group.prompt_lens, batch.context_lens[group.sequences] - 1).any()
        for group in batch.groups
    )


class _Step:
    """A step over the tensors that its graph reads; `last` is that of the last run, which notes what it measures."""

    def __init__(self, run: Callable[[PagedStep], torch.Tensor], make: Callable[[], PagedStep]) -> None:
        self._run = run
        self._make = make
        self.last: PagedStep | None = None

    def __call__(self) -> torch.Tensor:
        self.last = self._make()
        return self._run(self.last)


@dataclass
class _Known:
    """A combination that has come: in how many steps, its graphs without and with measurements, and whether it cannot
    be captured or there was no memory to."""

    steps: int = 0
    captured: dict[bool, tuple[Captured, _Step]] = field(default_factory=dict)
    refused: bool = False


class PolicyGraphs:
    """Captured steps of answers under several policies, made while serving; the least recently used are dropped."""

    def __init__(
        self,
        run: Forward,
        fill: Fill,
        pages: KVPages,
        needs: Needs,
        limits: Limits,
        answers: Answers,
        states: StateStore | None = None,
        observed: frozenset[int] = frozenset(),
    ) -> None:
        """`run`, `fill`, `needs`, `states` and `observed` as for `DecodeGraphs`; `answers` as `LayerPolicies` has
        it."""
        self._observed = observed
        self._states = states
        self._run = run
        self._fill = fill
        self._pages = pages
        self._answers = answers
        self._needs = needs
        self._contexts = contexts_for(needs, limits.max_model_len)
        self._choices = [limits.max_model_len]  # contexts where keys are chosen
        while self._choices[0] > _SMALLEST_CHOICE:
            self._choices.insert(0, max(-(-self._choices[0] // 2), _SMALLEST_CHOICE))
        self._device = pages.keys[0].device
        most = 2 * limits.max_num_seqs  # each group may be padded to less than twice its size
        self._groups = len(pages.shape.groups)
        kinds = 3 + self._groups + (0 if states is None else 2)
        self._long = torch.zeros((kinds, most), dtype=torch.int64, device=self._device)
        self._lens = torch.zeros(most, dtype=torch.int32, device=self._device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=self._device)
        self._rows = torch.arange(most, device=self._device)
        places = (self._groups, most, -(-limits.max_model_len // pages.shape.page_size))
        self._tables = torch.zeros(places, dtype=torch.int32, device=self._device)
        self._known: OrderedDict[tuple[tuple[tuple[StepPolicy, int], ...], int], _Known] = OrderedDict()
        self._pool: Any = None

    def use(self, pool: Any) -> None:
        """Capture into this memory pool from now on."""
        self._pool = pool

    def close(self) -> None:
        """Let go of all graphs. Their steps refer to this object, so that its end alone would leave them."""
        self._known.clear()

    def replay(self, batch: HostBatch, page_tables: DeviceTables) -> Replayed | None:
        """Run a decode step of B sequences; its logits (B, V) and the step, valid until the next replay.

        None if it cannot be captured, or has not come often enough to be. The pages of its sequences are in
        `page_tables`.
        """
        layout = lay_out(batch)
        if layout is None or layout.rows > len(self._rows):  # drafts may be rows of their own
            return None
        contexts = self._choices if layout.chooses_keys else self._contexts
        context = next(context for context in contexts if context >= batch.max_context_len)
        # Windows and budgets need less than the dense decodes that are counted.
        if layout.rows > 1 and self._needs(layout.rows, context).workspace_bytes > MOST_WORKSPACE_BYTES:
            return None
        known, measured = self._note(layout, context), _is_measured(batch)
        if known.refused or (measured not in known.captured and known.steps <= STEPS_BEFORE):
            return None
        self._put(batch, layout, page_tables)
        if measured not in known.captured:
            step = self._step(layout, context, measured)
            captured = self._capture(step)
            if captured is None:
                known.refused = True
                return None
            known.captured[measured] = captured, step
            self._drop()
        captured, step = known.captured[measured]
        captured.graph.replay()
        [places] = upload([layout.places], self._device)
        tap = None if step.last is None else step.last.tap
        return Replayed(captured.logits[places], step.last, None if tap is None else Tapped(tap.kept, layout.places))

    @property
    def captured(self) -> list[tuple[tuple[StepPolicy, int], ...]]:
        """The combinations that have a graph, the least recently used first."""
        return [groups for (groups, _), known in self._known.items() if known.captured]

    def _note(self, layout: Layout, context: int) -> _Known:
        key = layout.groups, context
        if key not in self._known:
            made = [self._answers(policy, 0, self._batch(0, size, context)) for policy, size in layout.groups]
            self._known[key] = _Known(refused=None in made)
        known = self._known[key]
        self._known.move_to_end(key)
        known.steps += 1
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known

    def _put(self, batch: HostBatch, layout: Layout, page_tables: DeviceTables) -> None:
        """Lay the step out in the tensors that the graphs read."""
        rows, places = layout.rows, layout.places
        long = np.zeros((len(self._long), rows), np.int64)
        long[3:] = -1  # padding reads no state, and writes nowhere
        long[:, places] = batch.input_ids, batch.positions, batch.seq_slots, *batch.all_slots, *batch.state_slots
        lengths = np.zeros(rows, np.int32)
        lengths[places] = batch.context_lens
        [on_device] = upload([long.reshape(-1)], self._device)
        self._long[:, :rows].copy_(on_device.view(-1, rows))
        [on_device] = upload([lengths], self._device)
        self._lens[:rows].copy_(on_device)
        # Padding has somebody's pages, of which it reads none.
        self._tables[:, :rows, : batch.num_pages].copy_(page_tables.rows(self._long[2, :rows], batch.num_pages))

    def _batch(self, start: int, size: int, context: int) -> PagedBatch:
        """The answers that are laid out in the rows from `start` on."""
        return PagedBatch(
            cu_seqlens_q=self._starts[: size + 1],
            context_lens=self._lens[start : start + size],
            page_table=self._tables[0, start : start + size],
            max_seqlen_q=1,
            max_context_len=context,
            num_decodes=size,
            other_tables=others(self._tables[:, start : start + size]),
        )

    def _step(self, layout: Layout, context: int, measured: bool) -> _Step:
        rows = layout.rows

        def make() -> PagedStep:
            groups, start = [], 0
            for policy, size in layout.groups:
                groups.append(self._answers(policy, start, self._batch(start, size, context), measured=measured))
                start += size
            there = tuple(group for group in groups if group is not None)  # each is, or the layout would be refused
            slots, of_states = self._long[3:, :rows].split([self._groups, len(self._long) - 3 - self._groups])
            batch = self._batch(0, rows, context)
            states = states_of(self._states, of_states, batch)
            tap = tap_of(self._observed)
            return PagedStep(self._pages, batch, slots[0], there, states=states, other_slots=others(slots), tap=tap)

        def run(step: PagedStep) -> torch.Tensor:
            input_ids = self._fill(self._long[0, :rows], self._long[2, :rows])
            return self._run(step, input_ids, self._long[1, :rows], self._rows[:rows])

        return _Step(run, make)

    def _capture(self, run: Callable[[], torch.Tensor]) -> Captured | None:
        # The run before the capture computes the step that is laid out: what it writes is what the replay writes again.
        try:
            return capture(run, self._pool)
        except torch.OutOfMemoryError as error:
            if distributed.is_initialized():
                raise  # the other ranks wait for this one's part of the step
            reason = str(error).strip().partition("\n")[0]
            logger.warning("no memory for the graph of a step under attention policies, which stays slow: %s", reason)
            return None

    def _drop(self) -> None:
        """Drop the graphs that have not been used for the longest time."""
        rows = 0
        for (groups, _), known in reversed(self._known.items()):
            if known.captured:
                size = len(known.captured) * sum(size for _, size in groups)
                if rows and rows + size > MOST_ROWS:
                    known.captured.clear()
                    known.steps = 0
                rows += size
