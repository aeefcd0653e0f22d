"""Delays, on a simulated clock: streams stay smooth beside a long prompt, and a short one does not wait for it.

A step takes what it would about take on one H200 with an 8B model. The engine is not told: it learns it from the steps.
"""

from __future__ import annotations

import itertools
import random

import pytest
from longreach.engine.cost_model import StepCost
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.messages import Generate, Sampling
from longreach.engine.requests.step_plan import StepPlan
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.priority import PATIENCE, head_start
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.engine.updates import Updates

from tests.server.engine.simulation import SimulatedRunner

GPU = StepCost(5e-3, 24e-6, 0.9e-9, 31e-9)
LONG = 131_072


class _Noisy(SimulatedRunner):
    """Steps take up to 3 percent more or less than they should."""

    def __init__(self, cost: StepCost) -> None:
        super().__init__(128, cost=cost)
        self._noise = random.Random(0)
        self.after_step = self.jitter
        self.before = 0.0

    def jitter(self, plan: StepPlan) -> None:
        self.now += (self.now - self.before) * self._noise.uniform(-0.03, 0.03)
        self.before = self.now


class _Bench:
    """An engine on a simulated clock; when each request's tokens came."""

    def __init__(self, max_itl: float = 0.05, cost: StepCost = GPU) -> None:
        limits = Limits(64, 8192, 2 * LONG, max_itl, resume_seconds=60.0)
        self.runner = _Noisy(cost)
        scheduler = Scheduler(PageAllocator(PagePool(4096, 128), PageHasher(128, "m")), limits)
        self.engine = Engine(scheduler, self.runner, self.runner.clock)
        self.sent: dict[str, float] = {}
        self.times: dict[str, list[float]] = {}

    def send(self, name: str, length: int, max_tokens: int, document: int = 0, **more) -> None:
        prompt = [document] * length
        self.sent[name] = self.runner.now
        spec = Generate(request_id=name, prompt=prompt, max_tokens=max_tokens, sampling=Sampling(seed=1), **more)
        assert self.engine.submit(spec) is None

    def step(self) -> None:
        for news in self.engine.step():
            assert isinstance(news, Updates)
            for update in news.updates:
                self.times.setdefault(update.request_id, []).extend([self.runner.now] * len(update.tokens))

    def until_first_token(self, name: str) -> float:
        while not self.times.get(name):
            self.step()
        return self.times[name][0] - self.sent[name]


@pytest.fixture(scope="module")
def alone() -> float:
    """The time to the first token of the long prompt when nobody else is there."""
    bench = _Bench()
    bench.send("long", LONG, 2)
    return bench.until_first_token("long")


def test_streams_stay_smooth_and_a_short_prompt_passes_a_long_one(alone: float) -> None:
    bench = _Bench()
    for i in range(8):
        bench.send(f"stream{i}", 2000, 3000, document=i + 1)
    for i in range(8):
        bench.until_first_token(f"stream{i}")
    for _ in range(50):
        bench.step()
    start = bench.runner.now
    bench.send("long", LONG, 2)
    while bench.runner.now < start + 3:
        bench.step()
    bench.send("short", 1000, 2, document=99)
    assert bench.until_first_token("short") < 0.5
    long = bench.until_first_token("long")
    times = [time for time in bench.times["stream0"] if time >= start]
    delays = sorted(b - a for a, b in itertools.pairwise(times))
    assert len(delays) > 100
    assert delays[int(0.99 * len(delays))] <= 0.05
    assert delays[len(delays) // 2] > 0.035, "the bound is not made use of: prompts are read too slowly"
    # What the streams' own tokens cost, and one fixed cost for every 50 ms, is all that the long prompt loses.
    assert long / alone < 1.35


def test_the_bound_is_the_callers(alone: float) -> None:
    medians = []
    for max_itl in (0.025, 0.1):
        bench = _Bench(max_itl)
        bench.send("stream", 2000, 3000, document=1)
        bench.until_first_token("stream")
        bench.send("long", LONG // 2, 2)
        bench.until_first_token("long")
        times = bench.times["stream"][20:]
        delays = sorted(b - a for a, b in itertools.pairwise(times))
        assert delays[int(0.99 * len(delays))] <= max_itl
        medians.append(delays[len(delays) // 2])
    assert medians[0] < 0.025 < medians[1]


def test_no_step_is_kept_short_for_a_flexible_answer_and_beside_others_it_counts_last(alone: float) -> None:
    bench = _Bench()
    bench.send("batch", 2000, 3000, document=1, flexible=True)
    bench.until_first_token("batch")
    bench.send("long", LONG, 2, flexible=True)
    steps = bench.runner.steps
    assert bench.until_first_token("long") == pytest.approx(alone, rel=0.1)
    assert bench.runner.steps - steps <= LONG // 8192 + 1
    assert len(bench.times["batch"]) > LONG // 8192, "it had no token in a step"
    assert bench.engine.scheduler.step_time.caution == 1.0, (
        "steps that nothing bounds make those careful that are bounded"
    )

    bench.send("stream", 2000, 3000, document=3)
    bench.until_first_token("stream")
    bench.send("last", LONG, 2, document=4, flexible=True)
    bench.send("first", LONG // 2, 2, document=5)
    bench.until_first_token("last")
    assert bench.times["first"][0] < bench.times["last"][0]
    delays = sorted(b - a for a, b in itertools.pairwise(bench.times["stream"][20:]))
    assert delays[int(0.99 * len(delays))] <= 0.05


def test_nobody_is_there_to_be_kept_waiting_and_chunks_are_full(alone: float) -> None:
    bench = _Bench(max_itl=0.001)
    bench.send("long", LONG, 2)
    assert bench.until_first_token("long") == pytest.approx(alone, rel=0.05)
    assert bench.runner.steps == LONG // 8192


def test_a_stream_whose_own_step_is_too_long_does_not_starve_prompts() -> None:
    bench = _Bench(max_itl=0.001)
    bench.send("stream", 2000, 3000, document=1)
    bench.until_first_token("stream")
    bench.send("late", 2000, 2, document=2)
    bench.until_first_token("late")
    assert bench.runner.steps < 2000 / 16 + 20


def test_a_retry_after_a_cancel_goes_on_where_it_was(alone: float) -> None:
    bench = _Bench()
    bench.send("first", LONG, 2)
    while bench.runner.now < 0.9 * alone:
        bench.step()
    bench.engine.cancel("first")
    bench.send("other", 200_000, 2, document=3)
    bench.until_first_token("other")
    bench.send("retry", LONG, 2)
    assert bench.until_first_token("retry") < 0.15 * alone


def test_a_second_question_on_a_document_does_not_read_it_again(alone: float) -> None:
    bench = _Bench()
    bench.send("first", LONG, 2)
    bench.until_first_token("first")
    bench.send("second", LONG + 50, 2)
    assert bench.until_first_token("second") < 0.02 * alone


def test_identical_prompts_in_flight_are_read_once(alone: float) -> None:
    bench = _Bench()
    for i in range(4):
        bench.send(f"r{i}", LONG, 2)
    assert max(bench.until_first_token(f"r{i}") for i in range(4)) < 1.1 * alone
    assert bench.runner.computed_tokens < 1.01 * LONG


@pytest.mark.parametrize("urgency", [-1, -100])
def test_urgent_prompts_without_end_delay_another_by_their_head_start_and_no_more(urgency: int) -> None:
    bench = _Bench(cost=StepCost(0.05, 1e-3, 0.0, 0.0))  # a second for a thousand tokens
    numbers = itertools.count(1)

    def flood() -> None:
        """There are always more urgent prompts than a step has room for."""
        while len(bench.engine.scheduler.waiting | bench.engine.scheduler.running) < 12:
            number = next(numbers)
            bench.send(f"urgent{number}", 1000, 1, document=number, priority=urgency)

    flood()
    bench.step()
    bench.send("default", 1000, 1, document=10**6)
    sent = bench.sent["default"]
    while not bench.times.get("default"):
        flood()
        bench.step()
        assert bench.runner.now < sent + 120, "it is starved"
    passed = [bench.sent[name] - sent for name in bench.times if name != "default"]
    assert max(passed) > 0, "those that came later were no more urgent"
    assert max(passed) <= -head_start(urgency) + PATIENCE * 1.1
    assert max(passed) > -head_start(urgency) - 9, "a step's time before that"


def test_steps_are_measured_by_the_device_where_they_overlap() -> None:
    """A host that comes late finds two steps done at once; what it learns is what each of them took."""
    bench = _Bench()
    bench.runner.overlaps = True
    bench.runner.before_result = lambda: setattr(bench.runner, "now", bench.runner.now + 0.2)
    bench.send("answer", 100, 100, document=1)
    bench.until_first_token("answer")
    bench.send("long", LONG, 2)
    bench.until_first_token("long")
    cost = bench.engine.scheduler.step_time.cost
    assert cost.per_token == pytest.approx(GPU.per_token, rel=0.1)
    assert cost.per_pair == pytest.approx(GPU.per_pair, rel=0.1)
