"""The engine without its process: requests in, updates out, one step at a time."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Literal, Protocol

from .constraint import Constraint
from .messages import Failed, Generate, Update, Updates
from .plan import StepPlan
from .request import Request
from .sampler import NOT_A_NUMBER
from .scheduler import Scheduler
from .step_time import Work

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What computes a plan; `runner.Runner`, or a stand-in."""

    def run(self, plan: StepPlan) -> dict[str, list[int]]:
        """The `num_draws` tokens of each request whose chunk draws any; only then has the step surely ended."""
        ...


class Engine:
    """A scheduler and a runner. `step` is the whole system: plan, run, commit, report.

    `clock` gives seconds; it measures steps, and dates arrivals and cancellations. `start_grammar` makes the constraint
    of a request with a grammar.
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
        self._unmeasured = Work()  # steps that were run since `_since` and may not have ended
        self._since = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self.scheduler.has_work

    def submit(self, spec: Generate) -> Failed | None:
        """Queue a request, or say why it can never run."""
        if not self.has_work:
            self._unmeasured = Work()  # the time that passed was idle
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
        start = self._clock()
        plan = self.scheduler.plan(start)
        if plan is None:
            return []
        try:
            drawn = self._runner.run(plan)
        except Exception:  # whatever it was, it ends these requests and not the server
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            self._unmeasured = Work()
            return self._fail([chunk.request for chunk in plan.chunks], "the model could not compute this request")
        self._measure(plan, start, ended=bool(drawn))
        broken = [c.request for c in plan.chunks if NOT_A_NUMBER in c.standing(drawn.get(c.request.id, []))]
        failures = self._fail(broken, "the model's output was not a number")
        failures += self._fail_stuck(plan)
        told = {chunk.request.id: (len(chunk.request.tokens), chunk.request.scored) for chunk in plan.chunks}
        self.scheduler.commit(plan, drawn)
        news = [
            _update(request, *told[request.id])
            for chunk in plan.chunks
            if (request := chunk.request).id in self.scheduler.running or request.finish_reason is not None
        ]
        cost = None if plan.num_decodes == len(plan.chunks) else self.scheduler.step_time.cost
        return [*failures, Updates(news, cost)] if news else failures

    def _measure(self, plan: StepPlan, start: float, ended: bool) -> None:
        """Tell the model of step time what the steps since the last measurement took, once they have ended."""
        if not self._unmeasured.steps:
            self._since = start
        self._unmeasured += plan.work
        if ended:
            self.scheduler.step_time.observe(self._unmeasured, self._clock() - self._since)
            self._unmeasured = Work()

    def _fail_stuck(self, plan: StepPlan) -> list[Updates | Failed]:
        """End requests whose grammar could not say what may come next."""
        requests = [chunk.request for chunk in plan.chunks]
        errors = [(request, request.constraint.error) for request in requests if request.constraint is not None]
        return [end for request, error in errors if error for end in self._fail([request], error, "invalid")]

    def _fail(
        self, requests: list[Request], message: str, kind: Literal["invalid", "internal"] = "internal"
    ) -> list[Updates | Failed]:
        here = [request for request in requests if self.scheduler.running.get(request.id) is request]
        for request in here:
            self.scheduler.discard(request)
        return [Failed(request_id=request.id, kind=kind, message=message) for request in here]


def _update(request: Request, length: int, scored: int) -> Update:
    """What is new of a request that had `length` tokens and `scored` scored ones."""
    known, request.logprobs = request.logprobs, {}  # what is left over belongs to drafts that did not stand
    return Update(
        request_id=request.id,
        prompt_tokens=request.prompt_tokens,
        computed=min(request.computed, request.prompt_tokens),
        cached=request.cached,
        tokens=request.tokens[length:],
        finish_reason=request.finish_reason,
        logprobs=[known[at] for at in range(length, len(request.tokens)) if at in known],
        prompt_logprobs=[known[at] for at in range(scored, request.scored)],
    )
