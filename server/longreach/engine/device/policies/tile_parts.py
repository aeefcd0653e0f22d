"""The parts of a group of prompts whose key tiles are chosen, from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from longreach_kernels import PagedBatch
from longreach_patches import ChoicePart, TileProbe

from longreach.engine.device.batch_builder import HostGroup
from longreach.engine.requests.tile_worth import TilePart
from longreach.util.transfer import upload

# A prompt's length for queries that are probed: the end of a prompt is read whole, and they are to choose as others.
_FAR = 1 << 30


def choice_parts(group: HostGroup, batch: PagedBatch) -> tuple[ChoicePart, ...]:
    """The parts of a group, whose sequences are `batch`. Neighbours that compute alike are one, but for probed ones."""
    runs: list[list[tuple[int, TilePart]]] = []
    for index, part in group.parts:
        last = runs[-1][-1][1] if runs else None
        alike = last is not None and last.dense == part.dense and not last.probed and not part.probed
        if alike:
            runs[-1].append((index, part))
        else:
            runs.append([(index, part)])
    made, start = [], 0
    for run in runs:
        end = start + sum(part.end - part.start for _, part in run)
        made.append(_part(start, end, run, group, batch, is_whole=len(runs) == 1 and len(run) == batch.size))
        start = end
    return tuple(made)


def _part(
    start: int, end: int, run: Sequence[tuple[int, TilePart]], group: HostGroup, batch: PagedBatch, *, is_whole: bool
) -> ChoicePart:
    device = batch.context_lens.device
    owners = [index for index, _ in run]
    lens, unknown, far = upload(
        [group.prompt_lens[owners], np.zeros(len(run), np.int32), np.array([_FAR], np.int32)], device
    )
    [(index, last)] = run[-1:]
    probe = None
    if last.probed:
        first = max(last.start, last.probe_start)
        alone = _batch([(index, first, last.end)], 0, batch)
        probe = TileProbe(end - (last.end - first), alone, last.probed, far)
    mine = batch
    if not is_whole:
        decodes = sum(owner < group.num_decodes for owner in owners)
        mine = _batch([(owner, part.start, part.end) for owner, part in run], decodes, batch)
    return ChoicePart(start, end, mine, lens, last.dense, unknown, probe)


def _batch(pieces: Sequence[tuple[int, int, int]], decodes: int, batch: PagedBatch) -> PagedBatch:
    """Queries of sequences of `batch` from one position to another, the first `decodes` of them alone."""
    device = batch.context_lens.device
    owners, starts, ends = np.array(pieces, np.int64).T
    counts = ends - starts
    cu_seqlens = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    cu_seqlens_q, context_lens = upload([cu_seqlens, ends.astype(np.int32)], device)
    [on_device] = upload([owners], device)
    return PagedBatch(
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        **batch.tables_of(on_device),
        max_seqlen_q=1 if decodes == len(pieces) else max(2, int(counts.max())),
        max_context_len=int(ends.max()),
        num_decodes=decodes,
        known_lengths=(tuple(counts.tolist()), tuple(ends.tolist())),
    )
