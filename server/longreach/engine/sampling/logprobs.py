"""Log-probabilities of the tokens of a step, for the requests that ask for them.

Only the rows of one step are ever held, and how many of a prompt's rows are in one is bounded (`MAX_DRAFTS`): the
memory does not depend on the prompt's length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from longreach.engine.messages import LEAST_LOGPROB
from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.sampling.row_invariant import likeliest, log_softmax
from longreach.engine.updates import Logprob
from longreach.util.transfer import OnItsWay, upload


class _Wanted(NamedTuple):
    """A place whose log-probability is asked for: the token there is known, or the `draw`-th of those drawn."""

    request: Request
    position: int
    row: int
    token: int
    draw: int

    @property
    def width(self) -> int:
        """How many of the likeliest tokens are asked for."""
        spec = self.request.spec
        return (spec.prompt_logprobs if self.position < self.request.prompt_tokens else spec.logprobs) or 0


class StepLogprobs:
    """The log-probabilities of one step, on their way to the host.

    `logits` (R, V) has the `num_rows` last rows of every chunk of `plan`, in order; `drawn` (D,) int64 what was drawn.
    """

    def __init__(self, plan: StepPlan, logits: torch.Tensor, drawn: torch.Tensor) -> None:
        self._wanted = _wanted(plan)
        if not self._wanted:
            return
        places = np.array([[one.row, one.token, one.draw] for one in self._wanted]).T
        rows, known, draws = upload(list(places), logits.device)
        logprobs = log_softmax(logits[rows].float())
        # A draw of NOT_A_NUMBER ends its request; until then it stands for some token.
        tokens = torch.where(draws < 0, known, drawn[draws].clamp(min=0)) if len(drawn) else known
        own = logprobs.gather(1, tokens[:, None]).squeeze(1).clamp(min=LEAST_LOGPROB)
        top = likeliest(logprobs, min(max(one.width for one in self._wanted), logits.shape[1]))
        self._results = OnItsWay(tokens, own, top, logprobs.gather(1, top).clamp(min=LEAST_LOGPROB))

    def deliver(self) -> None:
        """Wait for them and put them into their requests' `logprobs`; they are NaN where a row has no softmax."""
        if not self._wanted:
            return
        for one, token, logprob, top, values in zip(self._wanted, *self._results.lists(), strict=True):
            found = Logprob(token, logprob, top[: one.width], values[: one.width])
            one.request.logprobs[one.position] = found


def _wanted(plan: StepPlan) -> list[_Wanted]:
    found: list[_Wanted] = []
    row = draw = 0
    for chunk in plan.chunks:
        found += _of_chunk(chunk, row, draw)
        row += chunk.num_rows
        draw += chunk.num_draws
    return found


def _of_chunk(chunk: Chunk, row: int, draw: int) -> list[_Wanted]:
    """The chunk's places, its rows and draws being those from `row` and `draw` on."""
    request = chunk.request
    known = [_Wanted(request, at, row + i, request.tokens[at], -1) for i, at in enumerate(chunk.scored)]
    if request.spec.logprobs is None:
        return known
    first = row + chunk.num_rows - chunk.num_draws
    end = chunk.end - len(chunk.drafts)  # where the first of the chunk's draws will stand
    return known + [_Wanted(request, end + i, first + i, 0, draw + i) for i in range(chunk.num_draws)]
