"""The engine without its process: requests in, updates out, one step at a time."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from .density import PairCount
from .isolation import StepRunner, run_apart
from .messages import Failed, Generate, Stats, Update, Updates
from .plan import StepPlan
from .request import Request
from .sampler import NOT_A_NUMBER
from .scheduler import Scheduler
from .step_time import Work

logger = logging.getLogger(__name__)


class Engine:
    """A scheduler and a runner. `step` is the whole system: plan, run, commit, report.

    `clock` gives seconds; it measures steps, and dates arrivals and cancellations. `stats` and `step_seconds` may be
    read from another thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Callable[[], float] = time.monotonic,
        pairs: PairCount | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._pairs = PairCount() if pairs is None else pairs
        self._runner = runner
        self._clock = clock
        self._unmeasured = Work()  # steps that were run since `_since` and may not have ended
        self._since = 0.0
        self._step_began: float | None = None
        self.stats = self._take_stats()

    @property
    def step_seconds(self) -> float:
        """How long the step that is running has taken so far; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self.scheduler.has_work

    def submit(self, spec: Generate) -> Failed | None:
        """Queue a request, or say why it can never run."""
        if not self.has_work:
            self._unmeasured = Work()  # the time that passed was idle
        try:
            self.scheduler.add(Request.of(spec, secrets.randbits(63), self._clock()))
        except ValueError as error:
            return Failed(request_id=spec.request_id, kind="invalid", message=str(error))
        except Exception:  # as in a step: it ends this request and not the server
            logger.exception("request %s could not be taken", spec.request_id)
            return Failed(request_id=spec.request_id, kind="internal", message="the request could not be taken")
        self.stats = self._take_stats()
        return None

    def cancel(self, request_id: str) -> None:
        """Forget a request; its pages can be had when this returns."""
        self.scheduler.remove(request_id, self._clock())
        self.stats = self._take_stats()

    def step(self) -> list[Updates | Failed]:
        """Compute one step and return what is to be told to the callers, in order.

        Raises:
            DeviceLostError: this process cannot compute any more.
        """
        self._step_began = self._clock()
        try:
            return self._step(self._step_began)
        finally:
            self._step_began = None
            self.stats = self._take_stats()

    def _step(self, start: float) -> list[Updates | Failed]:
        plan = self.scheduler.plan(start)
        if unclean := self.scheduler.pool.unclean():
            self._runner.clean(unclean)
        if plan is None:
            return []
        for chunk in plan.chunks:
            if chunk.request.waited is None:
                chunk.request.waited = start - chunk.request.arrived
        drawn, failed = run_apart(self._runner, plan)
        failures = self._fail(failed, "the model could not compute this request")
        if failed:
            self._unmeasured = Work()
        else:
            self._pairs.add(plan)
            self._measure(plan, start, ended=bool(drawn))
        broken = [c.request for c in plan.chunks if NOT_A_NUMBER in c.standing(drawn.get(c.request.id, []))]
        failures += self._fail(broken, "the model's output was not a number")
        lengths = {chunk.request.id: len(chunk.request.tokens) for chunk in plan.chunks}
        self.scheduler.commit(plan, drawn)
        news = [
            Update(
                request_id=request.id,
                prompt_tokens=request.prompt_tokens,
                computed=min(request.computed, request.prompt_tokens),
                cached=request.cached,
                tokens=request.tokens[lengths[request.id] :],
                finish_reason=request.finish_reason,
                waited=request.waited or 0.0,
            )
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

    def _fail(self, requests: list[Request], message: str) -> list[Updates | Failed]:
        here = [request for request in requests if self.scheduler.running.get(request.id) is request]
        for request in here:
            self.scheduler.discard(request)
        return [Failed(request_id=request.id, kind="internal", message=message) for request in here]

    def _take_stats(self) -> Stats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=pool.num_pages,
            free_pages=pool.num_free,
            cached_pages=pool.cache.num_idle,
            preemptions=scheduler.preemptions,
            causal_pairs=self._pairs.causal,
            computed_pairs=self._pairs.computed,
        )
