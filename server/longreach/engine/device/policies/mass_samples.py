"""What part of the dense attention's mass a policy keeps, measured on a few queries of each prompt that has one, and of
its answer if that reads a budget of keys; how many tiles were chosen, and of how much a budget may have missed.

The queries are chosen by their positions alone, so that it does not matter how the prompt is cut; the mass is exact.
Where heads are split over ranks, it is that of the first rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_kernels.sizes import KEY_BLOCK
from longreach_kernels.sparse import keys_read
from longreach_patches import MassSample, PagedStep, StepMeasurements

from longreach.engine.device.batch_builder import HostBatch, HostGroup
from longreach.engine.requests.request import Request
from longreach.engine.requests.sparse_decode_stats import TokenRead
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.requests.tile_worth import TilePart
from longreach.policies.values import SparseDecode
from longreach.util.transfer import OnItsWay, upload

# Queries of a prompt, evenly spread, and its last one.
_SAMPLES = 64
# Of an answer's tokens that read a budget, one in so many is measured: it costs what dense attention to all keys does.
_EVERY = 64


class _Queries(NamedTuple):
    """Sampled queries of a chunk: whose they are, and at which positions."""

    request: Request
    positions: list[int]


@dataclass(eq=False)
class _Group:
    """The chunks of one policy in a step, what is asked of them, and what was measured, on its way to the host.

    The rows of `kept` are those of `queries` one after another.
    """

    chunks: tuple[Chunk, ...]
    queries: list[_Queries] = field(default_factory=list)
    sample: MassSample | None = None
    kept: OnItsWay | None = None
    visited: OnItsWay | None = None
    missed: OnItsWay | None = None
    parts: tuple[tuple[int, TilePart], ...] = ()
    visited_layers: tuple[int, ...] = ()
    floor: tuple[tuple[int, int, int, OnItsWay], ...] = ()

    def deliver(self, drawn: dict[str, list[int]]) -> None:
        """As `StepSamples.deliver`."""
        if self.visited is not None:
            by_part = zip(*self.visited.lists()[0], strict=True)
            for (index, part), counts in zip(self.parts, by_part, strict=True):
                chosen = dict(zip(self.visited_layers, counts, strict=True))
                self.chunks[index].request.measured.tiles.add(part, chosen)
        if self.missed is not None:
            _count_reads(self.chunks, self.missed.lists()[0], drawn)
        if self.floor:
            self._note_tests()
        if self.kept is None:
            return
        values, start = np.array(self.kept.lists()[0], np.float32), 0
        for one in self.queries:
            kept = values[start : start + len(one.positions)]
            start += len(one.positions)
            if one.positions[0] < one.request.prompt_tokens:
                one.request.measured.kept.append(kept)
            elif (reads := one.request.reads) is not None:
                for position, part in zip(one.positions, kept, strict=True):
                    if position < reads.end:  # else its token was a draft
                        reads.add_kept(float(part.mean()), float(part.min()))

    def _note_tests(self) -> None:
        """Note what the tests of drawn queries found in each part: a row for each slot of its sequences, as in
        `longreach_kernels.sparse.select.query_tiles`."""
        for first, size, tile, found in self.floor:
            values, before = np.array(found.lists()[0], np.float64), 0
            for place, (index, part) in enumerate(self.parts[first : first + size]):
                slot = before // tile + place
                own = values[slot : slot + -(-(part.end - part.start) // tile)]
                tests = self.chunks[index].request.measured.floor
                tests.add(part.start, tile, own[:, :5], own[:, 5:].astype(np.float32))
                before += part.end - part.start


def sampled(prompt_tokens: int, start: int, end: int) -> list[int]:
    """The positions from `start` to `end` that are looked at in a prompt."""
    spread = {(2 * i + 1) * prompt_tokens // (2 * _SAMPLES) for i in range(_SAMPLES)} | {prompt_tokens - 1}
    return sorted(position for position in spread if start <= position < end)


def is_sampled(prompt_lens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Which of the `positions` of answers behind prompts of such lengths `sampled_of_answer` has."""
    return (positions - prompt_lens) % _EVERY == 0


def sampled_of_answer(prompt_tokens: int, start: int, end: int) -> list[int]:
    """The positions from `start` to `end` that are looked at in an answer that reads a budget of keys."""
    return [position for position in range(start, end) if (position - prompt_tokens) % _EVERY == 0]


class StepSamples:
    """The sampled queries of one step; none where all requests are dense, or write their answers and see all."""

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    @property
    def samples(self) -> list[MassSample | None]:
        """What is asked of each group."""
        return [group.sample for group in self._groups]

    @classmethod
    def of_step(cls, plan: StepPlan, batch: HostBatch, paged: PagedBatch) -> StepSamples:
        """What is to be measured in a step that has not run."""
        by_policy = plan.groups if batch.groups else ()
        return cls([_asked(group, chunks, paged) for group, (_, chunks) in zip(batch.groups, by_policy, strict=True)])

    @classmethod
    def of_replay(cls, plan: StepPlan, step: PagedStep | None) -> StepSamples | None:
        """What a captured step of answers has measured; None if it has no budgets of keys.

        Behind its answers a group may have rows that are padding.
        """
        if step is None or all(group.budget is None for group in step.groups):
            return None
        groups = []
        for measured, (_, chunks) in zip(step.measured(), plan.groups, strict=True):
            group = _Group(chunks)
            if measured.missed is not None:
                group.missed = OnItsWay(_of_tokens(measured.missed, measured.whole)[: len(chunks)])
            if measured.kept is not None:
                _take_turns(group, measured.kept)
            groups.append(group)
        return cls(groups)

    def collect(self, measured: StepMeasurements) -> None:
        """Send what the step has measured to the host: the mass that was kept, the tiles that were chosen, and bounds
        of what was missed."""
        for group, found in zip(self._groups, measured, strict=True):
            group.kept = None if found.kept is None else OnItsWay(found.kept)
            group.visited = None if found.visited is None else OnItsWay(found.visited)
            group.visited_layers = found.visited_layers
            group.missed = None if found.missed is None else OnItsWay(_of_tokens(found.missed, found.whole))
            group.floor = tuple(
                (first, size, one.tile_q, OnItsWay(torch.cat([one.counts, one.least.double()], 1)))
                for first, size, one in found.floor
            )

    def deliver(self, drawn: dict[str, list[int]]) -> None:
        """Wait for it and add it to the requests' measurements, but for drafts that do not stand, given what the step
        has `drawn` for each request."""
        for group in self._groups:
            group.deliver(drawn)


def _asked(group: HostGroup, chunks: tuple[Chunk, ...], paged: PagedBatch) -> _Group:
    """The queries of a group that are looked at, of a step with the sequences `paged`."""
    asked = _Group(chunks, parts=group.parts)
    rows: list[int] = []
    owners: list[int] = []
    lengths: list[int] = []
    firsts = accumulate((chunk.num_sequences for chunk in chunks), initial=0)
    for index, chunk in zip(firsts, chunks, strict=False):
        request = chunk.request
        if isinstance(chunk.policy, SparseDecode):
            found = _uncounted(chunk)
        elif chunk.policy.is_dense or request.generated:
            continue
        else:
            found = sampled(request.prompt_tokens, chunk.start, chunk.end)
        rows += [int(group.cu_seqlens_q[index]) + position - chunk.start for position in found]
        owners += [group.sequences.start + index] * len(found)
        lengths += [position + 1 for position in found]
        if found:
            asked.queries.append(_Queries(request, found))
    if rows:
        device = paged.context_lens.device
        on_device, owner = upload([np.array(rows), np.array(owners)], device)
        starts, lens = upload([np.arange(len(rows) + 1, dtype=np.int32), np.array(lengths, np.int32)], device)
        alone = PagedBatch(
            cu_seqlens_q=starts,
            context_lens=lens,
            **paged.tables_of(owner),
            max_seqlen_q=1,
            max_context_len=max(lengths),
            num_decodes=len(rows),
            known_lengths=((1,) * len(rows), tuple(lengths)),
        )
        asked.sample = MassSample(on_device, alone)
    return asked


def _take_turns(group: _Group, kept: torch.Tensor) -> None:
    """Note what those answers kept whose turn it is, of a captured step that has measured all, `kept` (rows, ...)."""
    rows = []
    for row, chunk in enumerate(group.chunks):
        if positions := _uncounted(chunk):
            rows.append(row)
            group.queries.append(_Queries(chunk.request, positions))
    if rows:
        [taken] = upload([np.array(rows)], kept.device)
        group.kept = OnItsWay(kept[taken])


def _uncounted(chunk: Chunk) -> list[int]:
    """The positions of an answer that a chunk has and that are looked at, but for those that were before: a preemption
    has them computed again."""
    reads = chunk.request.reads
    assert reads is not None
    return sampled_of_answer(chunk.request.prompt_tokens, max(chunk.start, reads.end), chunk.end)


def _of_tokens(missed: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
    """(T, 3): of `missed` (layers, T, heads) the mean and the greatest over layers and heads, and the number of layers
    that read `whole` (layers, T), all keys."""
    layers = missed.new_zeros(missed.shape[1]) if whole is None else whole.sum(0).to(missed.dtype)
    return torch.stack([missed.mean((0, 2)), missed.amax((0, 2)), layers], 1)


def _count_reads(chunks: tuple[Chunk, ...], missed: list[list[float]], drawn: dict[str, list[int]]) -> None:
    """Count what the tokens of a group of chunks have read, `missed` being that of all of them in turn."""
    first = 0
    for chunk in chunks:
        reads = chunk.request.reads
        assert reads is not None
        stands = chunk.length - len(chunk.drafts)
        if chunk.num_draws:
            stands += len(chunk.standing(drawn[chunk.request.id])) - 1
        lengths = range(chunk.start + 1, chunk.start + stands + 1)
        tokens = [
            TokenRead(keys_read(length, reads.budget), -(-length // KEY_BLOCK), mean, most, round(whole))
            for length, (mean, most, whole) in zip(lengths, missed[first : first + stands], strict=True)
        ]
        reads.add(chunk.start, tokens)
        first += chunk.length
