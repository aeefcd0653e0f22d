"""What part of the dense attention's mass a policy keeps, measured on a few queries of each prompt that has one, and of
its answer if that reads a budget of keys; how many tiles were chosen, and of how much a budget may have missed.

The queries are chosen by their positions alone, so that it does not matter how the prompt is cut; the mass is exact.
Where heads are split over ranks, it is that of the first rank's.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_kernels.sparse import BLOCK, keys_read
from longreach_patches import BlockBudget, MassSample, StepGroup

from longreach.engine.device.batch_builder import HostBatch, HostGroup
from longreach.engine.messages import DENSE
from longreach.engine.requests.request import Request
from longreach.engine.requests.sparse_decode_stats import TokenRead
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.util.transfer import OnItsWay, upload

# Queries of a prompt, evenly spread, and its last one.
_SAMPLES = 64
# Of an answer's tokens that read a budget, one in so many is measured: it costs what dense attention to all keys does.
_EVERY = 64


class _Queries(NamedTuple):
    """Sampled queries of a chunk: whose they are, at which positions, and their group."""

    request: Request
    positions: list[int]
    group: int


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

    def __init__(self) -> None:
        self.samples: list[MassSample | None] = []
        self._queries: list[_Queries] = []
        self._results: list[OnItsWay] = []
        self._chunks: list[tuple[Chunk, ...]] = []
        self._visited: list[OnItsWay | None] = []
        self._missed: list[OnItsWay | None] = []

    @classmethod
    def of_step(cls, plan: StepPlan, batch: HostBatch, paged: PagedBatch) -> StepSamples:
        """What is to be measured in a step that has not run."""
        found = cls()
        for number, (group, (_, chunks)) in enumerate(
            zip(batch.groups, plan.groups if batch.groups else (), strict=True)
        ):
            found._chunks.append(chunks)
            found.samples.append(found._of_group(number, group, chunks, paged))
        return found

    @classmethod
    def of_replay(cls, plan: StepPlan, groups: tuple[StepGroup, ...]) -> StepSamples | None:
        """What a captured step of answers has measured; None if it has no budgets of keys.

        Behind its answers a group may have rows that are padding.
        """
        if all(group.budget is None for group in groups):
            return None
        found = cls()
        for number, (group, (_, chunks)) in enumerate(zip(groups, plan.groups, strict=True)):
            found._chunks.append(chunks)
            found._visited.append(None)
            tokens = None if group.budget is None else OnItsWay(_of_tokens(group.budget)[: len(chunks)])
            found._missed.append(tokens)
            found.samples.append(found._of_answers(number, group, chunks))
        return found

    def _of_answers(self, number: int, group: StepGroup, chunks: tuple[Chunk, ...]) -> MassSample | None:
        """The measurements of those answers whose turn it is, of a step that has measured all of them."""
        rows = []
        for row, chunk in enumerate(chunks if group.sample is not None else ()):
            if positions := _uncounted(chunk):
                rows.append(row)
                self._queries.append(_Queries(chunk.request, positions, number))
        if group.sample is None or not rows:
            return None
        kept = torch.stack(group.sample.kept, 1)
        [taken] = upload([np.array(rows)], kept.device)
        self._results.append(OnItsWay(kept[taken]))
        return group.sample

    def _of_group(
        self, number: int, group: HostGroup, chunks: tuple[Chunk, ...], paged: PagedBatch
    ) -> MassSample | None:
        rows: list[int] = []
        owners: list[int] = []
        lengths: list[int] = []
        firsts = accumulate((chunk.num_sequences for chunk in chunks), initial=0)
        for index, chunk in zip(firsts, chunks, strict=False):
            request = chunk.request
            if chunk.policy.is_decode:
                found = _uncounted(chunk)
            elif chunk.policy == DENSE or request.generated:
                continue
            else:
                found = sampled(request.prompt_tokens, chunk.start, chunk.end)
            rows += [int(group.cu_seqlens_q[index]) + position - chunk.start for position in found]
            owners += [group.sequences.start + index] * len(found)
            lengths += [position + 1 for position in found]
            if found:
                self._queries.append(_Queries(request, found, number))
        if not rows:
            return None
        device = paged.context_lens.device
        on_device, owner = upload([np.array(rows), np.array(owners)], device)
        starts, lens = upload([np.arange(len(rows) + 1, dtype=np.int32), np.array(lengths, np.int32)], device)
        alone = PagedBatch(
            cu_seqlens_q=starts,
            context_lens=lens,
            page_table=paged.page_table[owner],
            max_seqlen_q=1,
            max_context_len=max(lengths),
            num_decodes=len(rows),
            known_lengths=((1,) * len(rows), tuple(lengths)),
        )
        return MassSample(on_device, alone)

    def collect(self, groups: tuple[StepGroup, ...]) -> None:
        """Send what the step has measured to the host: the mass that was kept, the tiles that were chosen, and bounds
        of what was missed."""
        self._visited = [
            OnItsWay(torch.stack(group.choice.visited).sum(0)) if group.choice is not None else None for group in groups
        ]
        self._missed = [OnItsWay(_of_tokens(group.budget)) if group.budget is not None else None for group in groups]
        self._results = [
            OnItsWay(torch.stack(sample.kept, 1)) for sample in self.samples if sample is not None and sample.kept
        ]

    def deliver(self, drawn: dict[str, list[int]]) -> None:
        """Wait for it and put it into the requests' `kept`, (queries, layers, heads) for each chunk, and `reads`, but
        for drafts that do not stand, given what the step has `drawn` for each request."""
        measured = [n for n, sample in enumerate(self.samples) if sample is not None and sample.kept]
        values = {
            n: np.array(on_its_way.lists()[0], np.float32)
            for n, on_its_way in zip(measured, self._results, strict=True)
        }
        for chunks, visited in zip(self._chunks, self._visited, strict=True):
            if visited is not None:
                for chunk, tiles in zip(chunks, visited.lists()[0], strict=True):
                    chunk.request.visited += tiles
        for chunks, missed in zip(self._chunks, self._missed, strict=True):
            if missed is not None:
                _count_reads(chunks, missed.lists()[0], drawn)
        taken = dict.fromkeys(values, 0)
        for one in self._queries:
            if one.group in values:
                start = taken[one.group]
                taken[one.group] += len(one.positions)
                kept = values[one.group][start : taken[one.group]]
                if one.positions[0] < one.request.prompt_tokens:
                    one.request.kept.append(kept)
                elif one.request.reads is not None:
                    for position, part in zip(one.positions, kept, strict=True):
                        if position < one.request.reads.end:  # else its token was a draft
                            one.request.reads.add_kept(float(part.mean()), float(part.min()))


def _uncounted(chunk: Chunk) -> list[int]:
    """The positions of an answer that a chunk has and that are looked at, but for those that were before: a preemption
    has them computed again."""
    reads = chunk.request.reads
    assert reads is not None
    return sampled_of_answer(chunk.request.prompt_tokens, max(chunk.start, reads.end), chunk.end)


def _of_tokens(budget: BlockBudget) -> torch.Tensor:
    """(T, 2): the mean and the greatest over layers and heads of what each token has missed at most."""
    missed = torch.stack(budget.missed)
    return torch.stack([missed.mean((0, 2)), missed.amax((0, 2))], 1)


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
            TokenRead(keys_read(length, reads.budget), -(-length // BLOCK), mean, most)
            for length, (mean, most) in zip(lengths, missed[first : first + stands], strict=True)
        ]
        reads.add(chunk.start, tokens)
        first += chunk.length
