"""A step that fails costs the requests that make it fail, and nobody else."""

from __future__ import annotations

import logging
from typing import Protocol

from .plan import StepPlan
from .request import Request

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What computes a plan; `runner.Runner`, or a stand-in."""

    def run(self, plan: StepPlan) -> dict[str, list[int]]:
        """The `num_draws` tokens of each request whose chunk draws any; only then has the step surely ended.

        It may be run again with the same chunks, which write the same keys and values to the same places.
        """
        ...

    def clean(self, pages: list[int]) -> None:
        """See that these pages hold numbers; what they held is not needed."""
        ...

    def recover(self) -> None:
        """Make ready for the next `run` after one that raised.

        Raises:
            DeviceLostError: nothing can be computed any more.
        """
        ...


def run_apart(runner: StepRunner, plan: StepPlan) -> tuple[dict[str, list[int]], list[Request]]:
    """Run a plan; if it fails, run its halves, and so on down to the requests that fail alone.

    Returns what was drawn, and the requests that failed. Of a step of n requests of which one is bad, about 2 log2(n)
    parts are run again; a step that was too large for the memory goes on in two.

    Raises:
        DeviceLostError: as `StepRunner.recover`.
    """
    try:
        return runner.run(plan), []
    except Exception:  # whatever it was: a kernel, the memory, the sampling of one row
        requests = [chunk.request for chunk in plan.chunks]
        shown = ", ".join(request.id for request in requests[:8]) + (", ..." if len(requests) > 8 else "")
        logger.exception("a step of %d tokens failed (requests: %s)", plan.num_tokens, shown)
    runner.recover()
    if len(requests) == 1:
        return {}, requests
    middle = len(requests) // 2
    first, failed_first = run_apart(runner, StepPlan(plan.chunks[:middle]))
    second, failed_second = run_apart(runner, StepPlan(plan.chunks[middle:]))
    return first | second, failed_first + failed_second
