"""Who comes first, and how much of a step prompts get. Pure functions of requests and predicted times."""

from __future__ import annotations

from .request import Request
from .step_time import StepCost, Work

# A prompt lets shorter ones pass that arrive within so many times its own predicted time, and no others.
PATIENCE = 8.0
# A step's prediction may be off by so much before the bound on inter-token delay is missed.
_HEADROOM = 0.95
# Where the streams alone reach the bound, prompts still get this part of it: slowly, but they are read.
_LEAST_SHARE = 0.25


def seniority(request: Request) -> tuple[bool, int, float, str]:
    """The order in which answers keep their pages: the last is preempted first."""
    return request.spec.flexible, request.spec.priority, request.arrived, request.id


def rank(request: Request, computed: int, cost: StepCost, chunk: int) -> tuple[bool, int, float, int]:
    """What prompts are sorted by: flexible ones last, then priority, then shortest remaining work, with ageing.

    A request that arrived at time a and needs r more seconds of prefill, alone and in full chunks, has the rank
    a + PATIENCE * r. Of two that arrive together the shorter goes first; but it does not matter how many short ones
    arrive later than PATIENCE * r after a long one, they all come after it.
    """
    length = len(request.tokens)
    remaining = cost.prefill_seconds(computed, length, chunk, request.reach_under)
    return request.spec.flexible, request.spec.priority, request.arrived + PATIENCE * remaining, length - computed


def seconds_for_prompts(streams: Work, cost: StepCost, max_itl: float) -> float:
    """How long the prompts' chunks may take in a step beside `streams`, so that these get a token every `max_itl`."""
    return max(_HEADROOM * max_itl - cost.seconds(streams), _LEAST_SHARE * max_itl)
