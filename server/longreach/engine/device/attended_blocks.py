"""Which blocks of its prompt each token of an answer attended to most, for the requests that ask for it.

A step leaves the queries that drew tokens (`QueryTap`). Behind the step their scores are computed over the keys in the
pages (`longreach_kernels.sparse.add_block_scores`), summed over some layers. So the step itself computes what it does
without this, and captured steps are replayed as they are. The requests' own tokens cannot change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_kernels.sizes import KEY_BLOCK
from longreach_kernels.sparse import add_block_scores
from longreach_patches import KeptQueries, KVPages, QueryTap

from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.device.graphs.capture import Tapped, others
from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import StepPlan
from longreach.engine.updates import AttendedBlocks
from longreach.util.transfer import OnItsWay, upload

_MOST_LAYERS = 16
# Blocks that are told of each token.
_TOLD = 16
# The prompt's last tokens are no place: they are the question, most often, and heads that look at what is near look
# there. Nor is the first block, where heads put what they do not need.
_LAST = 32


def observed_layers(full: Iterable[int]) -> frozenset[int]:
    """The layers whose attention is looked at, of those that see everything: the upper half, 16 at most.

    In lower layers heads gather what is near, and tell little of what an answer is taken from.
    """
    layers = sorted(full)
    upper = layers[len(layers) // 2 :]
    count = min(len(upper), _MOST_LAYERS)
    return frozenset(upper[(number + 1) * len(upper) // count - 1] for number in range(count))


class _Drawn(NamedTuple):
    """A token that a step draws for a request that asks: where it will stand, and which row of the logits it is of."""

    request: Request
    position: int
    row: int


class StepAttended:
    """The best blocks of one step's tokens, on their way to the host; `tables` and `pages` are those of the step."""

    def __init__(self, drawn: list[_Drawn], tapped: Tapped, pages: KVPages, tables: DeviceTables, backend: str) -> None:
        self._drawn = drawn
        device = pages.device
        rows = np.array([one.row for one in drawn])
        places = rows if tapped.rows is None else tapped.rows[rows]
        slots = np.array([one.request.seq_slot for one in drawn])
        kept, owners = upload([places, slots], device)
        # The query of a token is the one before it, which sees itself.
        lengths = np.array([one.position for one in drawn], np.int32)
        ends = np.array([max(0, one.request.prompt_tokens - _LAST) // KEY_BLOCK for one in drawn], np.int32)
        starts, lens, ends = upload([np.arange(len(drawn) + 1, dtype=np.int32), lengths, ends], device)
        most = int(lengths.max())
        found = tables.rows(owners, -(-most // pages.shape.page_size))
        batch = PagedBatch(
            cu_seqlens_q=starts,
            context_lens=lens,
            page_table=found[0],
            other_tables=others(found),
            max_seqlen_q=1,
            max_context_len=most,
            num_decodes=len(drawn),
        )
        scores = torch.zeros((len(drawn), -(-most // KEY_BLOCK)), dtype=torch.float32, device=device)
        for layer, (queries, call) in tapped.kept.items():
            of_layer = batch.of_group(pages.shape.group_of[layer])
            _add(KeptQueries(queries[kept], call), pages.keys[layer], of_layer, scores, backend)
        block = torch.arange(scores.shape[1], device=device)
        scores = scores.masked_fill((block == 0) | (block >= ends[:, None]), 0.0)
        top = scores.topk(min(_TOLD, scores.shape[1]))
        self._found = OnItsWay(top.indices, top.values)

    @classmethod
    def of(
        cls, plan: StepPlan, tapped: Tapped | None, pages: KVPages, tables: DeviceTables, backend: str
    ) -> StepAttended | None:
        """Of a step that has been launched; None if no request asks. The pages are read before the next step's."""
        drawn = _drawn(plan)
        if not drawn:
            return None
        assert tapped is not None, "a request that asks was let in where no layer is looked at"
        return cls(drawn, tapped, pages, tables, backend)

    def deliver(self) -> None:
        """Wait for them and put them into their requests' `attended`."""
        for one, blocks, scores in zip(self._drawn, *self._found.lists(), strict=True):
            told = [number for number, score in enumerate(scores) if score > 0]
            one.request.attended[one.position] = AttendedBlocks(
                [blocks[number] for number in told], [scores[number] for number in told]
            )


def compile_scores(tap: QueryTap, pages: KVPages, context: int, backend: str) -> None:
    """Launch what any `StepAttended` launches, over the first page alone: for a step that has left some queries, for
    whose first one there are so many keys."""
    for layer, (queries, call) in tap.kept.items():
        device = pages.device
        starts, lens = upload([np.arange(2, dtype=np.int32), np.array([context], np.int32)], device)
        table = torch.zeros((1, -(-context // pages.shape.page_size)), dtype=torch.int32, device=device)
        batch = PagedBatch(starts, lens, table, max_seqlen_q=1, max_context_len=context, num_decodes=1)
        scores = torch.zeros((1, -(-context // KEY_BLOCK)), dtype=torch.float32, device=device)
        _add(KeptQueries(queries[:1].contiguous(), call), pages.keys[layer], batch, scores, backend)


def _add(kept: KeptQueries, keys: torch.Tensor, batch: PagedBatch, scores: torch.Tensor, backend: str) -> None:
    call = kept.call
    add_block_scores(
        kept.queries,
        keys,
        batch,
        scores,
        scale=call.scale,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        k_scale=None if call.kv_scales is None else call.kv_scales[0],
        backend=backend,
    )


def asks(plan: StepPlan) -> bool:
    """Whether a step draws a token for a request that wants to know what it attended to."""
    return any(chunk.num_draws and chunk.request.spec.places for chunk in plan.chunks)


def _drawn(plan: StepPlan) -> list[_Drawn]:
    found: list[_Drawn] = []
    row = 0
    for chunk in plan.chunks:
        row += chunk.num_rows
        if chunk.request.spec.places:
            first = chunk.end - len(chunk.drafts)  # where the first of the chunk's draws will stand
            found += [_Drawn(chunk.request, first + i, row - chunk.num_draws + i) for i in range(chunk.num_draws)]
    return found
