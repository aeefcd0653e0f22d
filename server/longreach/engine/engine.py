"""The engine without its process: requests in, updates out, one step at a time."""

from __future__ import annotations

import logging
import secrets
from typing import Protocol

from .messages import Failed, Generate, Update, Updates
from .plan import StepPlan
from .request import Request
from .sampler import NOT_A_NUMBER
from .scheduler import Scheduler

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What computes a plan; `runner.Runner`, or a stand-in."""

    def run(self, plan: StepPlan) -> dict[str, int]:
        """The token drawn by each request whose tokens are all computed after this step."""
        ...


class Engine:
    """A scheduler and a runner. `step` is the whole system: plan, run, commit, report."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner) -> None:
        self.scheduler = scheduler
        self._runner = runner

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self.scheduler.has_work

    def submit(self, spec: Generate) -> Failed | None:
        """Queue a request, or say why it can never run."""
        try:
            self.scheduler.add(Request.of(spec, seed=secrets.randbits(63)))
        except ValueError as error:
            return Failed(request_id=spec.request_id, kind="invalid", message=str(error))
        return None

    def cancel(self, request_id: str) -> None:
        """Forget a request; its pages are free when this returns."""
        self.scheduler.remove(request_id)

    def step(self) -> list[Updates | Failed]:
        """Compute one step and return what is to be told to the callers, in order."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        try:
            drawn = self._runner.run(plan)
        except Exception:  # whatever it was, it ends these requests and not the server
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            return [self._fail(chunk.request, "the model could not compute this request") for chunk in plan.chunks]
        failures: list[Updates | Failed] = [
            self._fail(chunk.request, "the model's output was not a number")
            for chunk in plan.chunks
            if drawn.get(chunk.request.id) == NOT_A_NUMBER
        ]
        lengths = {chunk.request.id: len(chunk.request.tokens) for chunk in plan.chunks}
        self.scheduler.commit(plan, drawn)
        news = [
            Update(
                request_id=request.id,
                prompt_tokens=request.prompt_tokens,
                computed=min(request.computed, request.prompt_tokens),
                tokens=request.tokens[lengths[request.id] :],
                finish_reason=request.finish_reason,
            )
            for chunk in plan.chunks
            if (request := chunk.request).id in self.scheduler.running or request.finish_reason is not None
        ]
        return [*failures, Updates(news)] if news else failures

    def _fail(self, request: Request, message: str) -> Failed:
        self.scheduler.remove(request.id)
        return Failed(request_id=request.id, kind="internal", message=message)
