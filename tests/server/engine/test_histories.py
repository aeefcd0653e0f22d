"""Random histories of the engine: whatever comes in which order, nothing is lost and every answer is the plain one.

Requests over a few shared documents come, are cancelled at any moment (in the middle of a step too), fail, speculate,
and fight for pages. After each call the invariants of scheduler, pages and prefix cache are checked; every stream is
compared with the one that its request gets alone, token by token. `make soak` runs thousands of histories.
"""

from __future__ import annotations

import logging
import math
import os
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from longreach.engine import engine as engine_module
from longreach.engine.cost_model import StepCost
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.kv_cache.state_allocator import StateAllocator
from longreach.engine.kv_cache.state_borders import BorderRule
from longreach.engine.kv_cache.state_pool import StatePool
from longreach.engine.looks import Look
from longreach.engine.messages import Failed, Generate, Pin, Sampling
from longreach.engine.requests.step_plan import StepPlan
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.policies.values import DENSE

from tests.server.engine.simulated_disk import Files, SimulatedDisk
from tests.server.engine.simulation import SimulatedRunner, States, Windows, expected_stream

MODEL_LEN, BUDGET, ROWS, RESUME_SECONDS = 80, 6, 4, 5.0
engine_module._PAUSE_SECONDS = 0.0  # the simulated disk works when it is looked at
LOGGERS = ("longreach.engine.engine", "longreach.engine.step_retry")
# The groups of layers of a model: all full, all windows, and both; then with recurrent states, alone and beside both.
MODELS: list[tuple[Windows, States]] = [
    *((windows, "none") for windows in [(None,), (None, 8, 8), (3,), (20, 20), (None, 1, 13), (6, None)]),
    ((None,), "alone"),
    ((None,), "beside"),
    ((None, 8), "beside"),
]
# Documents that begin alike, that differ at once, and one that repeats itself.
DOCUMENTS = [
    [1] * 40 + [2] * 40,
    [1] * 40 + [0] * 40,
    [1] * 13 + [2, 0] * 40,
    [2, 1, 0, 0, 1] * 16,
]

SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "pages": st.integers(20, 40),
    "page_size": st.sampled_from([1, 4]),
    "max_itl": st.sampled_from([math.inf, 0.2, 1e-6]),
    "promised": st.sampled_from([0, 1, 5, 100]),
    "overlaps": st.booleans(),
    "slots": st.sampled_from([0, 1, 7, 40, 200]),
    "restored": st.sampled_from([1, 3, 100]),
    "batch_invariant": st.booleans(),
    "model": st.sampled_from(MODELS),
    "copies": st.sampled_from([0, 1, 3, 100]),
    "state_places": st.sampled_from([1, 3, 7]),
    "rule": st.builds(BorderRule, st.sampled_from([1, 10, 1000]), st.sampled_from([1, 5, 30])),
    "disk": st.sampled_from([None, (1, 0), (3, 5), (30, 0), (30, 2)]),
}


class Histories(RuleBasedStateMachine):
    """An engine over simulated pages, a clock, and the requests that are in it."""

    requests = Bundle("requests")

    @initialize(settings=st.fixed_dictionaries(SETTINGS))
    def start(self, settings: dict[str, Any]) -> None:
        self.files: Files = {}
        self.names = iter(range(10**6))
        self.settings = SimpleNamespace(**settings)
        self.pins: dict[str, Pin] = {}
        self.begin()
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def begin(self) -> None:
        """A new engine, which finds on disk what others have left there."""
        how = self.settings
        self.page_size = how.page_size
        batch_invariant = how.batch_invariant and how.model[1] == "none"  # refused at the start
        self.batch_invariant = batch_invariant
        windows, kept = how.model
        self.windows = (None,) if kept == "alone" else (*windows, *([None] if kept == "beside" else []))
        host = HostTier(how.slots, 0 if kept == "none" else how.state_places) if how.slots else None
        states = None
        if kept != "none":
            states = StateAllocator(StatePool(3 + how.copies, host), how.page_size, copies=True, rule=how.rule)
        num_pages = len(windows) * how.pages * 4 // how.page_size
        pool = PagePool(num_pages, how.page_size, host)
        more = {"restored_pages": how.restored, "batch_invariant": batch_invariant}
        limits = Limits(ROWS, BUDGET, MODEL_LEN, how.max_itl, RESUME_SECONDS, how.promised, **more)
        cost = StepCost(0.05, 0.02, 1e-4, 1e-4)
        kinds = {"windows": windows, "states": kept}
        self.runner = SimulatedRunner(how.page_size, cost=cost, overlaps=how.overlaps, rounds=batch_invariant, **kinds)
        self.runner.after_step = self.while_a_step_runs
        if host is not None and how.disk is not None:
            store = self.open_disk()
            host.disk = DiskTier(store, host, store, 1, self.runner.clock)
        hasher = PageHasher(how.page_size, "m", answers_apart=batch_invariant)
        allocator = PageAllocator(pool, hasher, PageGroups(how.page_size, windows, BUDGET), states)
        self.engine = Engine(Scheduler(allocator, limits), self.runner, self.runner.clock)
        for pin in self.pins.values():
            self.engine.pin(pin)
        self.alive: dict[str, Generate] = {}
        self.streams: dict[str, list[int]] = {}
        self.scores: dict[str, list[int]] = {}  # the prompt's tokens whose log-probabilities have been told
        self.cancel_in_step: str | None = None
        self.left: str | None = None
        self.too_large: int | None = None
        self.doomed: set[str] = set()
        self.fail_result = self.failed_result = False
        self.fail_moves = self.failed_moves = False
        self.runner.before_move = self.while_pages_are_moved
        self.runner.before_result = self.while_a_result_is_fetched

    def open_disk(self) -> Any:
        """A disk with what engines before have left there, as a store and as the memory behind places."""
        return SimulatedDisk(self.runner, self.files, *self.settings.disk)

    @rule(
        target=requests,
        document=st.sampled_from(DOCUMENTS),
        length=st.integers(1, 75),
        max_tokens=st.integers(1, 30),
        stops=st.booleans(),
        speculate=st.integers(0, 4),
        priority=st.integers(-1, 1),
        flexible=st.booleans(),
        salt=st.sampled_from(["", "", "other"]),
        scored=st.booleans(),
    )
    def add(
        self,
        document: list,
        length: int,
        max_tokens: int,
        stops: bool,
        speculate: int,
        priority: int,
        flexible: bool,
        salt: str,
        scored: bool,
    ):
        spec = Generate(
            request_id=f"r{next(self.names)}",
            prompt=document[:length],
            max_tokens=max_tokens,
            stop_token_ids=[1] if stops else [],
            sampling=Sampling(seed=length),
            speculate=speculate,
            priority=priority,
            flexible=flexible,
            cache_salt=salt,
            prompt_logprobs=0 if scored else None,
        )
        failed = self.engine.submit(spec)
        assert (failed is not None) == (length + max_tokens > MODEL_LEN), failed
        if failed is not None:
            return multiple()
        self.alive[spec.request_id] = spec
        self.streams[spec.request_id] = []
        self.scores[spec.request_id] = [] if scored else spec.prompt[1:]
        return spec.request_id

    @rule(
        target=requests, documents=st.lists(st.sampled_from(range(3)), min_size=2, max_size=4), count=st.integers(1, 30)
    )
    def read_in_turn(self, documents: list[int], count: int):
        """Long prompts, one after the other, each of which makes the cache give up another; the last goes on."""
        names = []
        for index in documents:
            names.append(self.add(DOCUMENTS[index], 70, 2, False, 0, 0, False, "", False))
            for _ in range(count):
                self.step()
                self.engine.scheduler.check()
        return names[-1]

    @rule(document=st.sampled_from(DOCUMENTS), length=st.integers(1, 75), salt=st.sampled_from(["", "other"]))
    def look(self, document: list[int], length: int, salt: str) -> None:
        digests: list[bytes] = []
        PageHasher(self.page_size, "m").extend(digests, document[:length], salt, DENSE.key)
        question = Look(look_id=1, prompt_tokens=length, digests=b"".join(digests), max_tokens=5)
        allocator = self.engine.scheduler.allocator
        before = allocator.usage, allocator.state_usage
        found = self.engine.look(question)
        assert (allocator.usage, allocator.state_usage) == before
        again = self.engine.look(question)
        for tier in ("gpu", "host", "disk"):
            assert getattr(again, tier) == getattr(found, tier) >= 0
        assert found.cached < length
        assert found.seconds_now is None or found.seconds_now >= (found.seconds_alone or 0.0)

    @rule(name=consumes(requests))
    def cancel(self, name: str) -> None:
        self.engine.cancel(name)
        self.alive.pop(name, None)

    @rule(name=consumes(requests))
    def cancel_while_the_next_step_runs(self, name: str) -> None:
        self.cancel_in_step = name

    @rule(
        name=st.sampled_from("abc"),
        document=st.sampled_from(DOCUMENTS),
        length=st.integers(0, 75),
        salt=st.sampled_from(["", "", "other"]),
    )
    def pin(self, name: str, document: list[int], length: int, salt: str) -> None:
        self.pins[name] = Pin(name, document[:length], salt)
        self.engine.pin(self.pins[name])

    @rule(name=st.sampled_from("abc"))
    def unpin(self, name: str) -> None:
        self.pins.pop(name, None)
        self.engine.unpin(name)

    @rule()
    def die(self) -> None:
        """The process ends at any moment, and another one begins: what was being written is lost."""
        self.begin()

    @rule(seconds=st.floats(0, 2 * RESUME_SECONDS))
    def wait(self, seconds: float) -> None:
        self.runner.now += seconds

    @rule(size=st.integers(1, ROWS))
    def steps_of_more_requests_fail(self, size: int) -> None:
        self.too_large = size

    @rule(name=consumes(requests))
    def fail_one(self, name: str) -> None:
        self.doomed.add(name)

    @rule(name=consumes(requests))
    def break_the_numbers_of_one(self, name: str) -> None:
        self.runner.broken.add(name)

    @rule()
    def fail_the_next_result(self) -> None:
        self.fail_result = True

    @rule()
    def fail_the_next_copies(self) -> None:
        self.fail_moves = True

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.engine.scheduler.check()

    def step(self) -> None:
        self.failed_result, self.failed_moves, self.left = False, False, None
        before, in_flight = self.runner.steps + self.runner.copied, self.engine._in_flight
        for news in self.engine.step():
            if isinstance(news, Failed):
                wrong = news.request_id in self.doomed | self.runner.broken
                assert wrong or self.failed_result or self.failed_moves, "it did nothing wrong"
                # Who leaves while a step runs may have lost its pages before, in the same step.
                left = self.failed_moves and news.request_id == self.left
                assert self.alive.pop(news.request_id, None) is not None or left
                continue
            for update in news.updates:
                spec = self.alive[update.request_id]
                stream = self.streams[update.request_id]
                stream += update.tokens
                seed, vocabulary = spec.sampling.seed or 0, self.runner._vocabulary
                expected = expected_stream(spec, seed, vocabulary, self.batch_invariant, self.windows)
                assert stream == expected[: len(stream)], spec
                assert max(update.cached, update.computed) <= update.prompt_tokens
                assert (update.finish_reason is not None) == (stream == expected)
                self.scores[update.request_id] += [score.token for score in update.prompt_logprobs]
                assert self.scores[update.request_id] == spec.prompt[1:][: len(self.scores[update.request_id])]
                assert not update.tokens or len(self.scores[update.request_id]) == len(spec.prompt) - 1
                if update.finish_reason is not None:
                    del self.alive[update.request_id]
        moved = self.runner.steps + self.runner.copied > before or self.failed_moves or in_flight is not None
        disk = self.engine.scheduler.allocator.disk
        moved |= disk is not None and disk.has_work
        assert moved or not self.alive, "requests are there and nothing is computed"

    def while_a_step_runs(self, plan: StepPlan) -> None:
        if self.too_large is not None and len(plan.chunks) > self.too_large:
            raise RuntimeError("a step that is too large")
        self.too_large = None
        if any(chunk.request.id in self.doomed for chunk in plan.chunks):
            raise RuntimeError("a request that cannot be computed")
        if self.cancel_in_step is not None:
            self.cancel(self.cancel_in_step)
            self.left, self.cancel_in_step = self.cancel_in_step, None

    def while_pages_are_moved(self, moves: CacheMoves) -> None:
        if self.fail_moves and moves.copies:
            self.fail_moves, self.failed_moves = False, True
            raise RuntimeError("copies that fail, on purpose")

    def while_a_result_is_fetched(self) -> None:
        if self.fail_result:
            self.fail_result, self.failed_result = False, True
            raise RuntimeError("a step that fails after it was launched, on purpose")

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check()
        assert set(scheduler.running) | set(scheduler.waiting) == set(self.alive)
        if not self.alive:
            assert scheduler.allocator.num_available == scheduler.allocator.num_pages

    def teardown(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.NOTSET)
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.step()
        self.nothing_is_lost()
        assert not self.alive, "a request is stuck"


TestHistories = Histories.TestCase
if "HYPOTHESIS_PROFILE" not in os.environ:
    TestHistories.settings = settings(max_examples=60, deadline=None)
