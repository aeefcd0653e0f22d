"""Log-probabilities of the tokens of a step, for the requests that ask for them.

Only the rows of one step are ever held, and how many of a prompt's rows are in one is bounded (`MAX_SCORED`): the
memory does not depend on the prompt's length.
"""

from __future__ import annotations

import torch

from .messages import Logprob
from .plan import Chunk, StepPlan


def note_logprobs(plan: StepPlan, logits: torch.Tensor, drawn: dict[str, list[int]]) -> None:
    """Put what is asked for into the requests' `logprobs`.

    `logits` (R, V) has the `num_rows` last rows of every chunk, in order; `drawn` the tokens that were drawn.
    """
    wanted: list[tuple[Chunk, int, int]] = []  # chunk, position, target
    rows: list[int] = []
    first = 0
    for chunk in plan.chunks:
        for offset, position, target in _targets(chunk, drawn.get(chunk.request.id, [])):
            wanted.append((chunk, position, target))
            rows.append(first + offset)
        first += chunk.num_rows
    if not wanted:
        return
    width = max(_width(chunk, position) for chunk, position, _ in wanted)
    logprobs = logits[torch.tensor(rows, device=logits.device)].float().log_softmax(-1)
    targets = torch.tensor([max(target, 0) for _, _, target in wanted], device=logits.device)
    own = logprobs.gather(1, targets[:, None]).squeeze(1).tolist()
    top_values, top_tokens = (part.tolist() for part in logprobs.topk(min(width, logits.shape[1]), dim=-1))
    for (chunk, position, target), value, values, tokens in zip(wanted, own, top_values, top_tokens, strict=True):
        count = _width(chunk, position)
        chunk.request.logprobs[position] = Logprob(target, value, tokens[:count], values[:count])


def _targets(chunk: Chunk, drawn: list[int]) -> list[tuple[int, int, int]]:
    """The chunk's rows that are wanted: (offset among its rows, position of the scored token, that token)."""
    request = chunk.request
    found = [(offset, position, request.tokens[position]) for offset, position in enumerate(chunk.scored)]
    if request.spec.logprobs is not None:
        for i, token in enumerate(drawn):
            position = len(request.tokens) + i
            found.append((chunk.num_rows - chunk.num_draws + i, position, token))
    return found


def _width(chunk: Chunk, position: int) -> int:
    spec = chunk.request.spec
    return (spec.prompt_logprobs if position < len(spec.prompt) else spec.logprobs) or 0
