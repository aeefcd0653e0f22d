"""CUDA graphs for answers under attention policies that have a closed form: windows, with and without sinks.

Which policies answer beside each other, and how many of each, is known only when they do. So such a step is launched
kernel by kernel at first, and captured when the same combination has come a few times. The rows of each policy are
padded to a power of two, so that not every request that comes or ends makes another combination.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from longreach_kernels import Mask, PagedBatch
from longreach_patches import KVPages, PagedStep, StepGroup
from torch import distributed

from .batch import HostBatch, Int64
from .graphs import MOST_WORKSPACE_BYTES, Captured, Fill, Forward, Needs, capture, contexts_for
from .limits import Limits
from .messages import DENSE, AttentionPolicy
from .transfer import upload

logger = logging.getLogger(__name__)

# Capturing a step takes as long as two or three of them do kernel by kernel.
STEPS_BEFORE = 4
# Rows of all graphs that are kept, for each of which its graph keeps the logits; and combinations that are counted.
MOST_ROWS = 256
_REMEMBERED = 64


@dataclass(frozen=True)
class Layout:
    """A step of B answers as rows, those of each policy padded to a power of two.

    Attributes:
        groups: the policies, in order, and the rows of each.
        places: (B,) the rows of the step's sequences.
    """

    groups: tuple[tuple[AttentionPolicy, int], ...]
    places: Int64

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(size for _, size in self.groups)


def lay_out(batch: HostBatch) -> Layout | None:
    """Where the sequences of a step stand; None if they do not all write answers."""
    if not batch.groups or not batch.is_decode_only:
        return None
    groups, places, start = [], [], 0
    for group in batch.groups:
        lengths = batch.context_lens[group.sequences]
        if group.policy != DENSE and (lengths <= group.prompt_lens).any():
            return None  # at a prompt's last token is measured what its policy keeps
        size = 1 << (len(lengths) - 1).bit_length()
        groups.append((group.policy, size))
        places.append(np.arange(start, start + len(lengths)))
        start += size
    return Layout(tuple(groups), np.concatenate(places))


@dataclass
class _Known:
    """A combination that has come: in how many steps, its graph, and whether there was no memory for one."""

    steps: int = 0
    captured: Captured | None = None
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
        masks: Callable[[AttentionPolicy], tuple[Mask, ...] | None],
    ) -> None:
        """`run`, `fill` and `needs` as for `DecodeGraphs`; `masks` gives what each layer computes under a policy, or
        None where that cannot be captured."""
        self._run = run
        self._fill = fill
        self._pages = pages
        self._masks = masks
        self._needs = needs
        self._contexts = contexts_for(needs, limits.max_model_len)
        self._device = pages.keys[0].device
        most = 2 * limits.max_num_seqs  # each group may be padded to less than twice its size
        self._long = torch.zeros((4, most), dtype=torch.int64, device=self._device)
        self._lens = torch.zeros(most, dtype=torch.int32, device=self._device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=self._device)
        self._rows = torch.arange(most, device=self._device)
        places = (most, -(-limits.max_model_len // pages.shape.page_size))
        self._table = torch.zeros(places, dtype=torch.int32, device=self._device)
        self._known: OrderedDict[tuple[tuple[tuple[AttentionPolicy, int], ...], int], _Known] = OrderedDict()
        self._pool: Any = None

    def use(self, pool: Any) -> None:
        """Capture into this memory pool from now on."""
        self._pool = pool

    def replay(self, batch: HostBatch) -> torch.Tensor | None:
        """Run a decode step of B sequences and return its logits (B, V), valid until the next replay.

        None if it cannot be captured, or has not come often enough to be.
        """
        layout = lay_out(batch)
        if layout is None or layout.rows > len(self._rows):  # drafts may be rows of their own
            return None
        masks = [self._masks(policy) for policy, _ in layout.groups]
        context = next(context for context in self._contexts if context >= batch.max_context_len)
        # A window's decodes need less than the dense ones that are counted.
        too_large = layout.rows > 1 and self._needs(layout.rows, context).workspace_bytes > MOST_WORKSPACE_BYTES
        if too_large or any(of_layers is None for of_layers in masks):
            return None
        known = self._note(layout, context)
        if known.refused or (known.captured is None and known.steps <= STEPS_BEFORE):
            return None
        self._put(batch, layout)
        if known.captured is None:
            known.captured = self._capture(self._step(layout, masks, context))
            known.refused = known.captured is None
            self._drop()
        if known.captured is None:
            return None
        known.captured.graph.replay()
        [places] = upload([layout.places], self._device)
        return known.captured.logits[places]

    @property
    def captured(self) -> list[tuple[tuple[AttentionPolicy, int], ...]]:
        """The combinations that have a graph, the least recently used first."""
        return [groups for (groups, _), known in self._known.items() if known.captured is not None]

    def _note(self, layout: Layout, context: int) -> _Known:
        key = layout.groups, context
        known = self._known.setdefault(key, _Known())
        self._known.move_to_end(key)
        known.steps += 1
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known

    def _put(self, batch: HostBatch, layout: Layout) -> None:
        """Lay the step out in the tensors that the graphs read."""
        rows, places, pages = layout.rows, layout.places, batch.page_table.shape[1]
        long = np.zeros((4, rows), np.int64)
        long[2] = -1  # padding writes nowhere
        long[:, places] = batch.input_ids, batch.positions, batch.slots, batch.rows
        short = np.zeros((rows, pages + 1), np.int32)
        short[places, 0] = batch.context_lens
        short[places, 1:] = batch.page_table
        [on_device] = upload([long.reshape(-1)], self._device)
        self._long[:, :rows].copy_(on_device.view(4, rows))
        [on_device] = upload([short.reshape(-1)], self._device)
        self._lens[:rows].copy_(on_device.view(rows, -1)[:, 0])
        self._table[:rows, :pages].copy_(on_device.view(rows, -1)[:, 1:])

    def _step(self, layout: Layout, masks: list[tuple[Mask, ...] | None], context: int) -> Callable[[], torch.Tensor]:
        def batch_of(start: int, size: int) -> PagedBatch:
            return PagedBatch(
                cu_seqlens_q=self._starts[: size + 1],
                context_lens=self._lens[start : start + size],
                page_table=self._table[start : start + size],
                max_seqlen_q=1,
                max_context_len=context,
                num_decodes=size,
            )

        groups, start = [], 0
        for (_, size), of_layers in zip(layout.groups, masks, strict=True):
            groups.append(StepGroup(start, start + size, batch_of(start, size), of_layers))
            start += size
        step = PagedStep(self._pages, batch_of(0, start), self._long[2, :start], tuple(groups))

        def run() -> torch.Tensor:
            input_ids = self._fill(self._long[0, :start], self._long[3, :start])
            return self._run(step, input_ids, self._long[1, :start], self._rows[:start])

        return run

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
            if known.captured is not None:
                size = sum(size for _, size in groups)
                if rows and rows + size > MOST_ROWS:
                    known.captured, known.steps = None, 0
                rows += size
