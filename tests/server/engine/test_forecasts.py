"""Predictions of first tokens, on a simulated clock: alone, in queues, beside answers, where pages are short."""

from __future__ import annotations

import pytest
from longreach.engine.cost_model import StepCost
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.looks import Looked
from longreach.engine.messages import Generate
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.restore_time import RestoreTime
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.engine.updates import Updates

from tests.server.engine.simulation import SimulatedRunner
from tests.server.engine.test_looks import look

GPU = StepCost(5e-3, 24e-6, 0.9e-9, 31e-9)  # about an 8B model's on one H200
PAGE, STEP = 512, 8192


class Copying(SimulatedRunner):
    """Takes 20 ms for each page that comes back."""

    def move(self, moves: CacheMoves) -> None:
        super().move(moves)
        self.now += 0.02 * len(moves.restored)


class Bench:
    """An engine on a simulated clock, which has learned what steps cost and how long answers are."""

    def __init__(self, answer: int = 60, pages: int = 1024, seqs: int = 64, host: HostTier | None = None) -> None:
        self.runner = Copying(PAGE, cost=GPU)
        limits = Limits(seqs, STEP, 1 << 20, 0.05, restored_pages=16)
        scheduler = Scheduler(PageAllocator(PagePool(pages, PAGE, host), PageHasher(PAGE, "m")), limits)
        self.engine = Engine(scheduler, self.runner, self.runner.clock)
        self.answer = answer
        self.first: dict[str, float] = {}
        self.send("learned", 30_000)
        while self.engine.has_work:
            self.step()

    def send(self, name: str, length: int, document: int = 1000, **more) -> None:
        request = Generate(request_id=name, prompt=[document] * length, max_tokens=self.answer, **more)
        assert self.engine.submit(request) is None

    def step(self) -> None:
        for news in self.engine.step():
            assert isinstance(news, Updates)
            for update in news.updates:
                if update.tokens:
                    self.first.setdefault(update.request_id, self.runner.now)

    def predicted(self, length: int, document: int = 77, **more) -> tuple[Looked, float]:
        """What is predicted for a request that is sent now, and the seconds that its first token then took."""
        found = look(self.engine, [document] * length, PAGE, max_tokens=self.answer, **more)
        begun = self.runner.now
        self.send("asked", length, document, **more)
        while "asked" not in self.first:
            self.step()
        return found, self.first["asked"] - begun


# Lengths of prompts that are there, and steps before the question; the length of what is asked for; those ahead of it.
QUEUES = {
    "alone": ([], 0, 20_000, 0),
    "the same before it": ([20_000] * 4, 0, 20_000, 4),
    "a long one passed": ([100_000], 2, 1000, 0),
    "many short ones": ([500] * 30, 0, 2000, 30),
    "answers beside it": ([1000] * 12, 8, 20_000, 0),
}


@pytest.mark.parametrize("name", QUEUES)
def test_a_first_token_comes_when_it_is_predicted(name: str) -> None:
    lengths, steps, asked, ahead = QUEUES[name]
    bench = Bench()
    for number, length in enumerate(lengths):
        bench.send(str(number), length, document=number)
    for _ in range(steps):
        bench.step()
    found, seconds = bench.predicted(asked)
    assert found.ahead == ahead
    assert found.seconds_now == pytest.approx(seconds, rel=0.2)
    assert (found.seconds_alone or 0.0) <= (found.seconds_now or 0.0) * (1 + 1e-9)


def test_a_prompt_waits_for_pages_and_for_a_slot() -> None:
    short_of_pages = Bench(answer=200, pages=100)
    for number in range(3):
        short_of_pages.send(str(number), 20_000, document=number)
    found, seconds = short_of_pages.predicted(20_000)
    assert found.seconds_now == pytest.approx(seconds, rel=0.2)
    assert seconds > 4, "it had not to wait for the end of an answer"
    short_of_slots = Bench(answer=200, seqs=4)
    for number in range(6):
        short_of_slots.send(str(number), 2000, document=number)
    found, seconds = short_of_slots.predicted(2000)
    assert found.seconds_now == pytest.approx(seconds, rel=0.2)
    assert seconds > 200 * 5e-3


def test_what_another_prompt_reads_first_is_not_counted_twice() -> None:
    bench = Bench()
    bench.send("first", 50_000, document=5)
    found, seconds = bench.predicted(50_100, document=5)
    assert found.gpu == 0
    assert found.seconds_now == pytest.approx(seconds, rel=0.1)
    assert found.seconds_now == pytest.approx(found.seconds_alone, rel=0.1)


def test_flexible_requests_count_last_and_give_way() -> None:
    bench = Bench()
    bench.send("flexible", 50_000, document=5, flexible=True)
    bench.step()
    found, seconds = bench.predicted(20_000)
    assert found.ahead == 0
    assert found.seconds_now == pytest.approx(seconds, rel=0.1)
    last = look(bench.engine, [6] * 80_000, PAGE, flexible=True)
    assert last.ahead == 1
    assert (last.seconds_now or 0) > 1.2 * (last.seconds_alone or 0)


def test_what_comes_back_from_host_memory_takes_time_that_is_learned() -> None:
    bench = Bench(answer=2, pages=64, host=HostTier(256))
    for document in (1, 2, 3):
        bench.send(f"read {document}", 25_000, document)
        while bench.engine.has_work:
            bench.step()
    found, seconds = bench.predicted(25_000, document=1)
    assert found.host > 0.9 * 25_000
    assert (found.seconds_alone, found.seconds_now) == (None, None), "nothing had come back before"
    assert (found.seconds_whole or 0) > 0
    while bench.engine.has_work:
        bench.step()
    del bench.first["asked"]
    found, seconds = bench.predicted(25_000, document=2)
    assert found.host > 0.9 * 25_000
    assert seconds > 0.5, "48 pages come back"
    assert found.seconds_now == pytest.approx(seconds, rel=0.2)
    assert found.seconds_alone == pytest.approx(seconds, rel=0.2)


def test_what_is_read_from_disk_is_told_apart_from_what_it_passes_through() -> None:
    learned = RestoreTime()
    assert learned.seconds(0, 0) == 0.0
    assert learned.seconds(1, 0) is None
    learned.observe(2.0, host=1000, disk=0)
    assert learned.seconds(500, 0) == pytest.approx(1.0)
    assert learned.seconds(500, 1) is None
    learned.observe(5.0, host=500, disk=1000)
    assert learned.seconds(0, 100) == pytest.approx(0.4)
    learned.observe(1.0, host=0, disk=1000)
    assert 0.1 < (learned.seconds(0, 100) or 0) < 0.4
