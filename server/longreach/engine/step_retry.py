"""A step that fails costs the requests that make it fail, and nobody else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from longreach_kernels.compile_beside import KernelsMissingError

from longreach.engine.errors import DeviceLostError
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import Chunk, StepPlan

logger = logging.getLogger(__name__)

# Waits for a step's end: the `num_draws` tokens (or NOT_A_NUMBER) of each request whose chunk draws any.
Result = Callable[[], dict[str, list[int]]]


class StepRunner(Protocol):
    """What computes plans; `runner.Runner`, or a stand-in.

    `overlaps` says whether `launch` returns before the step has ended, so that the next one can be planned meanwhile.
    Steps are computed in the order in which they are launched.
    """

    overlaps: bool

    def take_seconds(self) -> float | None:
        """What the steps took on the device whose results were waited for since the last call; None where the time
        between launch and result says it, as it does where steps do not overlap."""
        ...

    def launch(self, plan: StepPlan) -> Result:
        """Start a step. A token that the plan knows as PENDING is what its request drew in the step before.

        Chunks of a launch that raised may be launched again: they write the same to the same places.

        Raises:
            DeviceLostError: nothing can be computed any more.
            KernelsMissingError: kernels of the step are being compiled; nothing is broken.
        """
        ...

    def move(self, moves: CacheMoves) -> None:
        """Copy and clean pages for the step that is launched next, or never; called once for each plan.

        All that was launched before is done before. What is `evicted` is copied and what is `unclean` cleaned before
        any step to come. What is `restored` or `saved` may be copied beside the next step, but before the next call
        of `move` and the steps behind it take effect. Copies of one kind do not depend on each other; those of a
        kind that comes first in `CacheMoves` are made first.
        """
        ...

    def recover(self) -> None:
        """Make ready for the next step after one that failed.

        Raises:
            DeviceLostError: nothing can be computed any more.
        """
        ...

    def close(self) -> None:
        """Compute nothing more, and end what computes with this process."""
        ...


class Launched(NamedTuple):
    """What has become of a plan.

    Attributes:
        chunks: those that were launched.
        result: theirs.
        failed: requests that cannot be computed.
        waiting: requests that wait for kernels, and what says when they are there.
    """

    chunks: tuple[Chunk, ...] = ()
    result: Result = dict
    failed: tuple[Request, ...] = ()
    waiting: tuple[tuple[Request, KernelsMissingError], ...] = ()

    def beside(self, other: Launched) -> Launched:
        """Both together."""
        first, second = self.result, other.result
        return Launched(
            self.chunks + other.chunks,
            lambda: first() | second(),
            self.failed + other.failed,
            self.waiting + other.waiting,
        )


def launch_apart(runner: StepRunner, plan: StepPlan) -> Launched:
    """Launch a plan; if that fails, its halves, and so on down to the requests that fail alone.

    Of a step of n requests of which one is bad, about 2 log2(n) parts are launched again; a step that was too large for
    the memory goes on in two. Where kernels are missing, the first policy's requests are apart from the others first:
    most often they are dense, and miss none.

    Raises:
        DeviceLostError: as `StepRunner.launch` and `StepRunner.recover`.
    """
    requests = [chunk.request for chunk in plan.chunks]
    middle = len(requests) // 2
    try:
        return Launched(plan.chunks, runner.launch(plan))
    except DeviceLostError:
        raise
    except KernelsMissingError as missing:
        if len(requests) == 1:
            return Launched(waiting=((requests[0], missing),))
        (_, alike), *others = plan.groups
        middle = len(alike) if others else middle
    except Exception:  # whatever it was: a kernel, the memory, the sampling of one row
        shown = ", ".join(request.id for request in requests[:8]) + (", ..." if len(requests) > 8 else "")
        logger.exception("a step of %d tokens failed (requests: %s)", plan.num_tokens, shown)
        runner.recover()
        if len(requests) == 1:
            return Launched(failed=(requests[0],))
    first, second = StepPlan(plan.chunks[:middle]), StepPlan(plan.chunks[middle:])
    return launch_apart(runner, first).beside(launch_apart(runner, second))
