"""The engine without its process: requests in, updates out, one step at a time."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from .constraint import Constraint
from .messages import Failed, Generate, Update, Updates
from .plan import Chunk, StepPlan
from .request import Request
from .sampler import NOT_A_NUMBER
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

# Waits for a step's end: the `num_draws` tokens (or NOT_A_NUMBER) of each request whose chunk draws any.
Result = Callable[[], dict[str, list[int]]]
_FAILED = "the model could not compute this request"


class StepRunner(Protocol):
    """What computes plans; `runner.Runner`, or a stand-in.

    `overlaps` says whether `launch` returns before the step has ended, so that the next one can be planned meanwhile.
    Steps are computed in the order in which they are launched.
    """

    overlaps: bool

    def launch(self, plan: StepPlan) -> Result:
        """Start a step. A token that the plan knows as PENDING is what its request drew in the step before."""
        ...


class _InFlight(NamedTuple):
    plan: StepPlan
    result: Result
    since: float


class Engine:
    """A scheduler and a runner. `step` is the whole system: plan, launch, settle, report.

    Where the runner overlaps, a call launches one step and then settles the one before it, so that a device always has
    its next step. `clock` gives seconds; it measures steps, and dates arrivals and cancellations. `start_grammar` makes
    the constraint of a request with a grammar.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Callable[[], float] = time.monotonic,
        start_grammar: Callable[[str], Constraint] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._start_grammar = start_grammar
        self._clock = clock
        self._in_flight: _InFlight | None = None
        self._settled = 0.0  # when the last step was

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or settle anything."""
        return self.scheduler.has_work or self._in_flight is not None

    def submit(self, spec: Generate) -> Failed | None:
        """Queue a request, or say why it can never run."""
        request = Request.of(spec, secrets.randbits(63), self._clock())
        try:
            if spec.grammar is not None:
                if self._start_grammar is None:
                    raise ValueError("this engine was started without a tokenizer file, which grammars need")
                request.constraint = self._start_grammar(spec.grammar)
            self.scheduler.add(request)
        except ValueError as error:
            return Failed(request_id=spec.request_id, kind="invalid", message=str(error))
        return None

    def cancel(self, request_id: str) -> None:
        """Forget a request; its pages can be had when this returns."""
        self.scheduler.remove(request_id, self._clock())

    def step(self) -> list[Updates | Failed]:
        """Compute one step and return what is to be told to the callers, in order."""
        before, self._in_flight = self._in_flight, None
        start = self._clock()
        plan = self.scheduler.plan(start)
        news: list[Updates | Failed] = []
        if plan is not None:
            try:
                self._in_flight = _InFlight(plan, self._runner.launch(plan), start)
            except Exception:  # whatever it was, it ends these requests and not the server
                logger.exception("a step of %d tokens could not be launched", plan.num_tokens)
                news += self._fail([chunk.request for chunk in plan.chunks], _FAILED)
            else:
                self.scheduler.advance(plan)
        if before is not None:
            news += self._settle(before)
        if self._in_flight is not None and not self._runner.overlaps:
            news += self._settle(self._in_flight)
            self._in_flight = None
        return news

    def _settle(self, step: _InFlight) -> list[Updates | Failed]:
        """Wait for a step's end, record what it drew, and report it."""
        plan = step.plan
        here = [chunk for chunk in plan.chunks if self.scheduler.running.get(chunk.request.id) is chunk.request]
        try:
            drawn = step.result()
        except Exception:  # as above
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            return _failures(self.scheduler.abandon(), _FAILED)
        now = self._clock()
        self.scheduler.step_time.observe(plan.work, now - max(step.since, self._settled))
        self._settled = now
        broken = [c.request for c in here if NOT_A_NUMBER in c.standing(drawn.get(c.request.id, []))]
        failures = self._fail(broken, "the model's output was not a number")
        failures += self._fail_stuck(here)
        lengths = [chunk.request.known for chunk in here]
        self.scheduler.settle(drawn)
        updates = [
            _update(chunk, length)
            for chunk, length in zip(here, lengths, strict=True)
            if (request := chunk.request).id in self.scheduler.running or request.finish_reason is not None
        ]
        cost = None if plan.num_decodes == len(plan.chunks) else self.scheduler.step_time.cost
        return [*failures, Updates(updates, cost)] if updates else failures

    def _fail_stuck(self, chunks: list[Chunk]) -> list[Updates | Failed]:
        """End requests whose grammar could not say what may come next."""
        requests = [chunk.request for chunk in chunks]
        errors = [(request, request.constraint.error) for request in requests if request.constraint is not None]
        return [end for request, error in errors if error for end in self._fail([request], error, "invalid")]

    def _fail(
        self, requests: list[Request], message: str, kind: Literal["invalid", "internal"] = "internal"
    ) -> list[Updates | Failed]:
        """Forget those of the requests that are still here, and tell their callers."""
        here = [request for request in requests if self.scheduler.running.get(request.id) is request]
        for request in here:
            self.scheduler.discard(request)
        return _failures(here, message, kind)


def _failures(
    requests: list[Request], message: str, kind: Literal["invalid", "internal"] = "internal"
) -> list[Updates | Failed]:
    return [Failed(request_id=request.id, kind=kind, message=message) for request in requests]


def _update(chunk: Chunk, length: int) -> Update:
    """What a step has done for a request of which `length` tokens were known before."""
    request = chunk.request
    known, request.logprobs = request.logprobs, {}  # what is left over belongs to drafts that did not stand
    return Update(
        request_id=request.id,
        prompt_tokens=request.prompt_tokens,
        computed=min(chunk.end, request.prompt_tokens),
        cached=request.cached,
        tokens=request.tokens[length : request.known],
        finish_reason=request.finish_reason,
        logprobs=[known[at] for at in range(length, request.known) if at in known],
        prompt_logprobs=[known[at] for at in chunk.scored],
    )
