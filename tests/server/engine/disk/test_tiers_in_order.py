"""What GPU memory, host memory and the disk keep of prompts that are asked in turn: of each its beginning."""

from __future__ import annotations

from typing import Any

import pytest
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.kv_cache.state_allocator import StateAllocator
from longreach.engine.kv_cache.state_borders import BorderRule
from longreach.engine.kv_cache.state_pool import StatePool
from longreach.engine.messages import Failed, Generate, Sampling
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.engine.updates import Update
from longreach.policies.values import DENSE

from tests.server.engine.simulated_disk import Files, SimulatedDisk
from tests.server.engine.simulation import SimulatedRunner, expected_stream

PAGE, PAGES = 4, 30  # tokens of a page, and pages of a document


class Bench:
    """An engine over three tiers of so many pages, whose runs share their `files`."""

    def __init__(self, files: Files, pages: int, places: int, most: int = 1000, *, states: bool = False) -> None:
        self.runner = SimulatedRunner(PAGE, states="alone" if states else "none")
        self.host = HostTier(places, 2 if states else 0)
        self.disk = SimulatedDisk(self.runner, files, 100, 0, most)
        self.host.disk = DiskTier(self.disk, self.host, self.disk, 1, self.runner.clock)
        pool = PagePool(pages, PAGE, self.host)
        kept = StateAllocator(StatePool(6, self.host), PAGE, copies=True, rule=BorderRule(8, 4)) if states else None
        groups = PageGroups(PAGE, (None,), 8)
        allocator = PageAllocator(pool, PageHasher(PAGE, "m"), groups, kept)
        limits = Limits(4, 8, 1000, restored_pages=2)
        self.engine = Engine(Scheduler(allocator, limits), self.runner, self.runner.clock)

    def ask(self, name: str, document: int, pages: int = PAGES) -> Update:
        """What the last message says about one request alone."""
        prompt = [document] * (pages * PAGE + 2)
        spec = Generate(request_id=name, prompt=prompt, max_tokens=3, sampling=Sampling(seed=1))
        assert self.engine.submit(spec) is None
        updates: list[Update] = []
        for _ in range(1000):
            if not self.engine.has_work:
                break
            for news in self.engine.step():
                assert not isinstance(news, Failed), news
                updates += news.updates
            self.engine.scheduler.check()
        assert [token for update in updates for token in update.tokens] == expected_stream(spec, 1, 3)
        for _ in range(50):  # what is to be written is
            self.runner.now += 1.0
            self.engine.step()
        return updates[-1]


def digests_of(document: int, pages: int = PAGES) -> list[bytes]:
    digests: list[bytes] = []
    PageHasher(PAGE, "m").extend(digests, [document] * (pages * PAGE), "", DENSE.key)
    return digests


def here(tier: Any, document: int, pages: int = PAGES) -> list[int]:
    return [page for page, digest in enumerate(digests_of(document, pages)) if digest in tier]


@pytest.mark.parametrize("states", [False, True])
def test_documents_that_all_tiers_hold_together_come_from_all(states: bool) -> None:
    """Three documents of 31 pages in 42 and 48 places: what is read for a request displaces nothing that it needs, and
    host memory has what the device has not."""
    files: Files = {}
    whole = 29 * PAGE if states else PAGES * PAGE
    for run in range(2):
        bench = Bench(files, 42, 48, states=states)
        last = [bench.ask(f"r{number}", number % 3) for number in range(6)]
        assert [update.cached for update in last] == [whole * run] * 3 + [whole] * 3
        assert [update.cached_disk for update in last[:3]] == [whole * run] * 3
        assert max(update.cached_disk for update in last[3:]) <= 10 * PAGE


def test_a_document_that_is_longer_than_host_memory_comes_in_turns() -> None:
    files: Files = {}
    Bench(files, 42, 48).ask("first", 0)
    bench = Bench(files, 34, 9)
    for at, number in enumerate((1, 0, 2, 0)):
        last = bench.ask(f"r{at}", number)
        assert last.cached == (0 if number else PAGES * PAGE)
        assert last.cached_disk >= last.cached // 2


def test_each_tier_keeps_the_beginnings_of_documents() -> None:
    bench = Bench({}, 34, 24, most=50)
    for number in range(5):
        bench.ask(f"r{number}", number)
    cache = bench.engine.scheduler.allocator._pool.cache
    for document in range(5):
        device = [page for page, digest in enumerate(digests_of(document)) if cache.has_digest(digest)]
        on_disk = here(bench.disk.files, document)
        both = sorted({*device, *here(bench.host, document)})
        for pages in (device, both, on_disk):
            assert pages == [*range(len(pages))], (document, pages)
    assert [len(here(bench.disk.files, document)) for document in range(5)] == [0, 0, 0, 19, 30]


def test_what_stays_on_the_device_stays_on_disk() -> None:
    bench = Bench({}, 100, 24, most=70)
    for number in range(3):
        bench.ask(f"new{number}", number)
        assert bench.ask(f"always{number}", 7).cached == (PAGES * PAGE if number else 0)
    assert here(bench.disk.files, 7) == [*range(PAGES)]
    assert len(here(bench.disk.files, 0)) == 0


def test_a_request_that_waits_for_the_disk_uses_what_it_waits_for() -> None:
    files: Files = {}
    Bench(files, 42, 48).ask("first", 0)
    bench = Bench(files, 42, 48)
    assert bench.disk.used(digests_of(0)[0]) == 0
    prompt = [0] * (PAGES * PAGE + 2)
    assert bench.engine.submit(Generate(request_id="waits", prompt=prompt, max_tokens=3, sampling=Sampling())) is None
    bench.engine.step()
    assert not bench.engine.scheduler.running
    assert bench.disk.used(digests_of(0)[0]) > bench.disk.used(digests_of(0)[1]) > 0


def test_of_a_document_larger_than_the_disk_the_beginning_stays() -> None:
    files: Files = {}
    bench = Bench(files, 42, 48, most=20)
    bench.ask("first", 0)
    assert here(files, 0) == [*range(20)]
    assert bench.engine.stats.disk is not None
    assert bench.engine.stats.disk.refused == 11
    assert Bench(files, 42, 48, most=20).ask("again", 0).cached_disk == 20 * PAGE


@pytest.mark.parametrize("states", [False, True])
def test_what_a_request_has_computed_itself_is_not_cached(states: bool) -> None:
    """A page in the middle is gone: it is computed, and what is behind it is read."""
    files: Files = {}
    Bench(files, 42, 48, states=states).ask("first", 0)
    bench = Bench(files, 42, 48, states=states)
    bench.disk.remove([digests_of(0)[10]])
    last = bench.ask("again", 0)
    answer = 2  # tokens that are computed, too
    assert last.cached == last.cached_disk == PAGES * PAGE + 2 + answer - bench.runner.computed_tokens
    assert last.cached == (17 if states else 28) * PAGE, "two pages are a step"
