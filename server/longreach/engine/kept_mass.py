"""What part of the dense attention's mass a policy keeps, measured on a few queries of each prompt that has one; and
how many tiles a dynamic policy chose.

The queries are chosen by their positions alone, so that it does not matter how the prompt is cut; the mass is exact.
Where heads are split over ranks, it is that of the first rank's.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_patches import MassSample, StepGroup

from .batch import HostBatch, HostGroup
from .messages import DENSE
from .plan import Chunk, StepPlan
from .request import Request
from .transfer import OnItsWay, upload

# Queries of a prompt, evenly spread, and its last one.
_SAMPLES = 64


class _Queries(NamedTuple):
    """Sampled queries of a chunk: whose they are, how many, and their group."""

    request: Request
    number: int
    group: int


def sampled(prompt_tokens: int, start: int, end: int) -> list[int]:
    """The positions from `start` to `end` that are looked at in a prompt."""
    spread = {(2 * i + 1) * prompt_tokens // (2 * _SAMPLES) for i in range(_SAMPLES)} | {prompt_tokens - 1}
    return sorted(position for position in spread if start <= position < end)


class StepSamples:
    """The sampled queries of one step; none where all requests are dense, or write their answers."""

    def __init__(self, plan: StepPlan, batch: HostBatch, paged: PagedBatch) -> None:
        self.samples: list[MassSample | None] = []
        self._queries: list[_Queries] = []
        self._results: list[OnItsWay] = []
        self._chunks: list[tuple[Chunk, ...]] = []
        self._visited: list[OnItsWay | None] = []
        for number, (group, (_, chunks)) in enumerate(
            zip(batch.groups, plan.groups if batch.groups else (), strict=True)
        ):
            self._chunks.append(chunks)
            self.samples.append(self._of_group(number, group, chunks, paged))

    def _of_group(
        self, number: int, group: HostGroup, chunks: tuple[Chunk, ...], paged: PagedBatch
    ) -> MassSample | None:
        rows: list[int] = []
        owners: list[int] = []
        lengths: list[int] = []
        firsts = accumulate((chunk.num_sequences for chunk in chunks), initial=0)
        for index, chunk in zip(firsts, chunks, strict=False):
            request = chunk.request
            if chunk.policy == DENSE or request.generated:
                continue
            found = sampled(request.prompt_tokens, chunk.start, chunk.end)
            rows += [int(group.cu_seqlens_q[index]) + position - chunk.start for position in found]
            owners += [group.sequences.start + index] * len(found)
            lengths += [position + 1 for position in found]
            if found:
                self._queries.append(_Queries(request, len(found), number))
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
        """Send what the step has measured to the host: the mass that was kept, and the tiles that were chosen."""
        self._visited = [
            OnItsWay(torch.stack(group.choice.visited).sum(0)) if group.choice is not None else None for group in groups
        ]
        self._results = [
            OnItsWay(torch.stack(sample.kept, 1)) for sample in self.samples if sample is not None and sample.kept
        ]

    def deliver(self) -> None:
        """Wait for it and put it into the requests' `kept`, (queries, layers, heads) for each chunk."""
        measured = [n for n, sample in enumerate(self.samples) if sample is not None and sample.kept]
        values = {
            n: np.array(on_its_way.lists()[0], np.float32)
            for n, on_its_way in zip(measured, self._results, strict=True)
        }
        for chunks, visited in zip(self._chunks, self._visited, strict=True):
            if visited is not None:
                for chunk, tiles in zip(chunks, visited.lists()[0], strict=True):
                    chunk.request.visited += tiles
        taken = dict.fromkeys(values, 0)
        for one in self._queries:
            if one.group in values:
                start = taken[one.group]
                one.request.kept.append(values[one.group][start : start + one.number])
                taken[one.group] += one.number
