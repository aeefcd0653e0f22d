"""The engine without its process: requests in, updates out, one step at a time."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from longreach_kernels.compile_beside import KernelsMissingError
from longreach_kernels.compile_counts import CompileCounts

from longreach.engine.errors import DeviceLostError, FailureKind
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.looks import Look, Looked
from longreach.engine.messages import Failed, Generate, Pin
from longreach.engine.pair_count import PairCount
from longreach.engine.requests.request import Constraint, Request
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.rope_choice import contents_key
from longreach.engine.sampling.sampler import NOT_A_NUMBER
from longreach.engine.scheduling.forecast import NO_SIZES, EntrySizes, Forecaster
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.engine.stats import Stats
from longreach.engine.step_retry import Result, StepRunner, launch_apart
from longreach.engine.updates import AttentionUse, DecodeUse, Update, Updates

logger = logging.getLogger(__name__)

# Between two looks at what the disk has done, where a step has nothing to compute.
_PAUSE_SECONDS = 0.001
# What a server that ends gives to what is not on disk yet.
_WRITING_SECONDS = 10.0
_NOT_COMPUTED = "the model could not compute this request"


class Policies(Protocol):
    """What is known of attention policies where the model is; `layer_masks.LayerPolicies`, or a stand-in."""

    def check(self, spec: Generate) -> None:
        """Raise a ValueError, whose message is the caller's, for a request whose policy the model cannot have."""
        ...


class Usage(Protocol):
    """Counts what attention policies left out; `usage.PolicyUsage`, or a stand-in."""

    heads: int  # of queries

    def of_prompt(self, request: Request, kept: list[npt.NDArray[np.float32]]) -> AttentionUse:
        """What a request's prompt was computed with; `kept` is what was measured of it, as `Measurements.kept`."""
        ...

    def of_answer(self, request: Request) -> DecodeUse | None:
        """What a request's answer has read so far under its decode budget; None if it has none."""
        ...


class _InFlight(NamedTuple):
    plan: StepPlan
    result: Result
    since: float


class _Compiling(NamedTuple):
    """A request that computes nothing until its kernels are compiled."""

    request: Request
    kernels: KernelsMissingError
    since: float


class Engine:
    """A scheduler and a runner. `step` is the whole system: plan, launch, settle, report.

    Where the runner overlaps, a call launches one step and then settles the one before it, so that a device always has
    its next step. `clock` gives seconds; it measures steps, and dates arrivals and cancellations. `sizes` are those of
    entries of the cache, which looks tell; `compiled` counts kernels. `stats` and `step_seconds` may be read from
    another thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Callable[[], float] = time.monotonic,
        pairs: PairCount | None = None,
        policies: Policies | None = None,
        usage: Usage | None = None,
        sizes: EntrySizes = NO_SIZES,
        compiled: CompileCounts | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._pairs = PairCount() if pairs is None else pairs
        self._runner = runner
        self._policies = policies
        self._usage = usage
        self._sizes = sizes
        self._compiled = CompileCounts() if compiled is None else compiled
        self._clock = clock
        self._in_flight: _InFlight | None = None
        self._compiling: list[_Compiling] = []
        self._step_began: float | None = None
        self._steps, self._seconds_of_steps = 0, 0.0
        self._stored, self._restored = [0, 0], [0, 0]  # pages, states
        self.stats = self._take_stats()

    @property
    def step_seconds(self) -> float:
        """How long the step that is running has taken so far; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    @property
    def has_work(self) -> bool:
        """Whether a step would compute, settle or copy anything."""
        return self.scheduler.has_work or self._in_flight is not None or self._disk_has_work

    @property
    def _disk_has_work(self) -> bool:
        disk = self.scheduler.allocator.disk
        return disk is not None and disk.has_work

    def submit(self, spec: Generate, constraint: Constraint | None = None) -> Failed | None:
        """Queue a request, or say why it can never run; `constraint` is the first state of its grammar."""
        assert (spec.grammar is None) == (constraint is None), f"request {spec.request_id}: grammar without its state"
        request = Request.of(spec, secrets.randbits(63), self._clock())
        try:
            if self._policies is not None:
                self._policies.check(spec)
            request.constraint = constraint
            if constraint is not None:
                for token in spec.drawn:
                    constraint.accept(token)
                if (error := constraint.error) is not None:
                    return Failed(request_id=spec.request_id, kind="grammar", message=error)
            self.scheduler.add(request)
        except ValueError as error:
            return Failed(request_id=spec.request_id, kind="invalid", message=str(error))
        except Exception:  # as in a step: it ends this request and not the server
            logger.exception("request %s could not be taken", spec.request_id)
            return Failed(request_id=spec.request_id, kind="internal", message="the request could not be taken")
        self.stats = self._take_stats()
        return None

    def look(self, look: Look) -> Looked:
        """What a request would get that is not sent; it changes nothing."""
        now, busy = self._clock(), 0.0
        if self._in_flight is not None:
            busy = max(
                0.0, self.scheduler.step_time.cost.seconds(self._in_flight.plan.work) + self._in_flight.since - now
            )
        return Forecaster(self.scheduler, now, busy, self._sizes).answer(look)

    def cancel(self, request_id: str) -> None:
        """Forget a request; its pages can be had when this returns."""
        self.scheduler.remove(request_id, self._clock())
        self.stats = self._take_stats()

    def pin(self, pin: Pin) -> None:
        """Evict what is cached of a prompt last; see `pinned_prompts`."""
        contents = contents_key(pin.attention, pin.rope_factor)
        self.scheduler.allocator.pinned.pin(pin.name, pin.prompt, pin.cache_salt, contents)

    def unpin(self, name: str) -> None:
        """End a pin, if there is one of this name."""
        self.scheduler.allocator.pinned.unpin(name)

    def close(self) -> None:
        """End what computes with this process. The engine is not used after that."""
        if (disk := self.scheduler.allocator.disk) is not None:
            end = self._clock() + _WRITING_SECONDS
            while disk.num_unwritten and self._clock() < end:
                self._move_pages(is_last=True)
                time.sleep(_PAUSE_SECONDS)
                disk.poll()
            disk.store.close()
        self._runner.close()

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
        before, self._in_flight = self._in_flight, None
        self._take_up_compiled(start)
        plan = self.scheduler.plan(start)
        news = self._move_pages()
        news += [] if plan is None else self._launch(plan, start)
        if before is not None:
            news += self._settle(before)
        if self._in_flight is not None and not self._runner.overlaps:
            news += self._settle(self._in_flight)
            self._in_flight = None
        if plan is None and before is None and (self._disk_has_work or self._compiling):
            time.sleep(_PAUSE_SECONDS)  # there is nothing to do until a file is written or read, or a kernel compiled
        if plan is not None or before is not None:
            self._seconds_of_steps += self._clock() - start
        return news

    def _move_pages(self, *, is_last: bool = False) -> list[Updates | Failed]:
        """Have pages copied and cleaned for the step that has been planned, or if `is_last` for the end; without them
        it goes on, too."""
        allocator = self.scheduler.allocator
        moves = allocator.take_moves(is_last=is_last)
        try:
            self._runner.move(moves)
        except DeviceLostError:
            raise
        except Exception:  # whatever it was, it ends the requests whose pages were brought back, and not the server
            if not moves.copies:
                raise
            logger.exception("%d pages and states could not be copied between device and host", moves.copies)
            self._runner.recover()
            self._runner.move(CacheMoves([], moves.unclean, [], []))
            return self._fail(self.scheduler.moves_failed(moves), _NOT_COMPUTED)
        allocator.moves_launched()
        for copy in moves.evicted + moves.saved:
            self._stored[copy.is_state] += 1
        for copy in moves.restored:
            self._restored[copy.is_state] += 1
        return []

    def _launch(self, plan: StepPlan, start: float) -> list[Updates | Failed]:
        """Start a step, without the requests that make it fail."""
        for chunk in plan.chunks:
            if chunk.request.waited is None:
                chunk.request.waited = start - chunk.request.arrived
        done = launch_apart(self._runner, plan)
        if done.chunks:
            launched = StepPlan(done.chunks)
            self._in_flight = _InFlight(launched, done.result, start)
            self._steps += 1
            self._pairs.add(launched)
            self.scheduler.advance(launched)
        news = self._fail(list(done.failed), _NOT_COMPUTED)
        if done.waiting:
            news.append(self._wait_for_kernels([_Compiling(*waiting, start) for waiting in done.waiting]))
        return news

    def _wait_for_kernels(self, waiting: list[_Compiling]) -> Updates:
        """Leave requests out of steps until the kernels that they need are compiled; what their callers are told."""
        for one in waiting:
            self.scheduler.hold_back(one.request)
        self._compiling += waiting
        return Updates([_progress(one.request, compiling=True) for one in waiting])

    def _take_up_compiled(self, now: float) -> None:
        """Let requests go on whose kernels are there."""
        for one in self._compiling:
            if one.kernels.is_done:
                one.request.compiling = False
                logger.info("request %s waited %.1f s for kernels", one.request.id, now - one.since)
        self._compiling = [one for one in self._compiling if one.request.compiling and self._is_here(one.request)]

    def _is_here(self, request: Request) -> bool:
        return request.id in self.scheduler.running or request.id in self.scheduler.waiting

    def _settle(self, step: _InFlight) -> list[Updates | Failed]:
        """Wait for a step's end, record what it drew, and report it."""
        plan = step.plan
        here = [chunk for chunk in plan.chunks if self.scheduler.running.get(chunk.request.id) is chunk.request]
        try:
            drawn = step.result()
        except Exception:  # whatever it was, it ends these requests and not the server
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            self._runner.recover()
            return _failures(self.scheduler.abandon(), _NOT_COMPUTED)
        now = self._clock()
        # Where steps overlap, the host may come late to one and then find the next one done too: its clock would say
        # that this one took no time, and the model of step time would believe that steps are free.
        on_device = self._runner.take_seconds()
        if not any(chunk.policy.is_dynamic for chunk in plan.chunks):  # how much those left out was not predicted
            seconds = now - step.since if on_device is None else on_device
            if plan.is_bounded:
                self.scheduler.step_time.judge(plan.work, seconds)
            self.scheduler.step_time.observe(plan.work, seconds)
        broken = [c.request for c in here if NOT_A_NUMBER in c.standing(drawn.get(c.request.id, [])) or _unscored(c)]
        failures = self._fail(broken, "the model's output was not a number")
        failures += self._fail_stuck(here)
        lengths = [chunk.request.known for chunk in here]
        self.scheduler.settle(drawn)
        updates = [
            _update(chunk, length, self._use(chunk.request, length), self._decode_use(chunk.request, length))
            for chunk, length in zip(here, lengths, strict=True)
            if (request := chunk.request).id in self.scheduler.running or request.finish_reason is not None
        ]
        cost = None if plan.num_decodes == len(plan.chunks) else self.scheduler.step_time.cost
        return [*failures, Updates(updates, cost)] if updates else failures

    def _use(self, request: Request, length: int) -> AttentionUse | None:
        """What the prompt of a request, of which `length` tokens were known before, was computed with; told once."""
        dense = request.spec.attention.is_dense
        if dense or self._usage is None or length != request.prompt_tokens or request.known == length:
            return None
        use = self._usage.of_prompt(request, request.measured.take_kept())
        if use.policy.is_dynamic:
            computed = (use.pairs + use.other_pairs) / self._usage.heads
            self._pairs.measured(request.cached, request.prompt_tokens, computed)
        return use

    def _decode_use(self, request: Request, length: int) -> DecodeUse | None:
        """What the answer of a request, of which `length` tokens were known before, has read, if it has new tokens."""
        if request.reads is None or self._usage is None or request.known == length:
            return None
        return self._usage.of_answer(request)

    def _fail_stuck(self, chunks: list[Chunk]) -> list[Updates | Failed]:
        """End requests whose grammar could not say what may come next."""
        requests = [chunk.request for chunk in chunks]
        errors = [(request, request.constraint.error) for request in requests if request.constraint is not None]
        return [end for request, error in errors if error for end in self._fail([request], error, "grammar")]

    def _fail(self, requests: list[Request], message: str, kind: FailureKind = "internal") -> list[Updates | Failed]:
        """Forget those of the requests that are still here, and tell their callers."""
        here = [request for request in requests if self.scheduler.running.get(request.id) is request]
        for request in here:
            self.scheduler.discard(request)
        return _failures(here, message, kind)

    def _take_stats(self) -> Stats:
        scheduler, pages = self.scheduler, self.scheduler.allocator.usage
        states = scheduler.allocator.state_usage
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=pages.pages,
            free_pages=pages.free,
            cached_pages=pages.cached,
            host_pages=pages.host_slots,
            used_host_pages=pages.used_host_slots,
            state_slots=states.slots,
            free_state_slots=states.free,
            state_copies=states.copies,
            host_state_copies=states.host_copies,
            stored_pages=self._stored[0],
            restored_pages=self._restored[0],
            stored_states=self._stored[1],
            restored_states=self._restored[1],
            preemptions=scheduler.preemptions,
            steps=self._steps,
            step_seconds=self._seconds_of_steps,
            causal_pairs=self._pairs.causal,
            computed_pairs=round(self._pairs.computed),
            compiled_beside=dict(self._compiled.beside),
            compiled_in_steps=dict(self._compiled.in_steps),
            disk=None if (disk := scheduler.allocator.disk) is None else disk.stats,
        )


def _progress(request: Request, *, compiling: bool) -> Update:
    """Where a request stands between two steps."""
    return Update(
        request_id=request.id,
        prompt_tokens=request.prompt_tokens,
        computed=min(request.computed, request.prompt_tokens),
        cached=request.cached,
        cached_host=request.hold.host_tokens,
        cached_disk=request.hold.disk_tokens,
        compiling=compiling,
    )


def _failures(requests: list[Request], message: str, kind: FailureKind = "internal") -> list[Updates | Failed]:
    return [Failed(request_id=request.id, kind=kind, message=message) for request in requests]


def _unscored(chunk: Chunk) -> bool:
    """Whether a token of the prompt has no log-probability, since the row before it is not of numbers."""
    return any(math.isnan(chunk.request.logprobs[at].logprob) for at in chunk.scored)


def _update(chunk: Chunk, length: int, use: AttentionUse | None, decode: DecodeUse | None) -> Update:
    """What a step has done for a request of which `length` tokens were known before."""
    request = chunk.request
    known, request.logprobs = request.logprobs, {}  # what is left over belongs to drafts that did not stand
    attended, request.attended = request.attended, {}
    return Update(
        request_id=request.id,
        prompt_tokens=request.prompt_tokens,
        computed=min(chunk.end, request.prompt_tokens),
        cached=request.cached,
        cached_host=request.hold.host_tokens,
        cached_disk=request.hold.disk_tokens,
        tokens=request.tokens[length : request.known],
        finish_reason=request.finish_reason,
        waited=request.waited or 0.0,
        logprobs=[known[at] for at in range(length, request.known) if at in known],
        prompt_logprobs=[known[at] for at in chunk.scored],
        attention=use,
        decode=decode,
        attended=[attended[at] for at in range(length, request.known) if at in attended],
    )
