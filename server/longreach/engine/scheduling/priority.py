"""Who comes first. Pure functions of requests and predicted times."""

from __future__ import annotations

from longreach.engine.cost_model import StepCost
from longreach.engine.requests.request import Request

# A prompt lets shorter ones pass that arrive within so many times its own predicted time, and no others.
PATIENCE = 8.0
# What no priority is worth more than, in seconds, and the priority that is worth half of it.
MOST_HEAD_START = 60.0
_HALF_PRIORITY = 10


def head_start(priority: int) -> float:
    """How many seconds later than it came a request of this `priority` counts as come; negative ones count earlier.

    Priority p is worth MOST_HEAD_START * p / (|p| + 10) seconds: 5 for one step, 30 for ten, 55 for a hundred. So a
    request waits for those of smaller numbers that arrive within two minutes, however many there are, and for no more.
    """
    return MOST_HEAD_START * priority / (abs(priority) + _HALF_PRIORITY)


def seniority(request: Request) -> tuple[bool, float, str]:
    """The order in which answers keep their pages: the last is preempted first."""
    return request.spec.flexible, request.arrived + head_start(request.spec.priority), request.id


def rank(request: Request, computed: int, cost: StepCost, chunk: int) -> tuple[bool, float, int]:
    """What prompts are sorted by: flexible ones last, then shortest remaining work, with priority and ageing.

    A request that arrived at time a with priority p and needs r more seconds of prefill, alone and in full chunks, has
    the rank a + head_start(p) + PATIENCE * r. Of two that arrive together the shorter goes first; but it does not
    matter how many short or urgent ones arrive later than PATIENCE * r + 2 * MOST_HEAD_START after a long one, they
    all come after it.
    """
    length = len(request.tokens)
    remaining = cost.prefill_seconds(computed, length, chunk, request.visible)
    due = due_at(request.arrived, request.spec.priority, remaining)
    return request.spec.flexible, due, length - computed


def due_at(arrived: float, priority: int, remaining: float) -> float:
    """The second part of a `rank`, of a prompt that takes `remaining` seconds to read."""
    return arrived + head_start(priority) + PATIENCE * remaining
