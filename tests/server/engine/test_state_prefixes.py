"""Prefixes of models with recurrent states: what a second question, a next turn, a retry and a neighbour read again.

A simulated model computes its tokens from slots alone, or from slots and pages. A wrong slot, or a border taken for
another, gives other tokens than the plain run's.
"""

from __future__ import annotations

import logging
import random

import pytest
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.borders import STATE_GROUP, key
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.kv_cache.state_allocator import SLOTS_PER_REQUEST, StateAllocator
from longreach.engine.kv_cache.state_pool import StatePool
from longreach.engine.messages import Failed, Generate, Sampling
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.scheduler import Scheduler

from tests.server.engine.simulation import SimulatedRunner, States, Windows, expected_stream

PAGE = 128


class Bench:
    """An engine over a simulated model with states; which tokens each request got, and how many it had computed."""

    def __init__(
        self,
        *,
        slots: int = 200,
        rows: int = 8,
        page: int = PAGE,
        pages: int = 600,
        step: int = 8192,
        kinds: States = "beside",
        overlaps: bool = True,
        caches: bool = True,
        host: HostTier | None = None,
        **limits: float,
    ) -> None:
        self.runner = SimulatedRunner(page, overlaps=overlaps, states=kinds)
        self.windows: Windows = (None,) if kinds == "alone" else (None, None)
        self.host = host
        self.states = StateAllocator(StatePool(slots, host), page, copies=caches)
        hasher = PageHasher(page, "m") if caches else None
        allocator = PageAllocator(PagePool(pages, page, host), hasher, states=self.states)
        bounds = Limits(rows, step, pages * page, resume_seconds=60.0, **limits)  # type: ignore[arg-type]
        self.engine = Engine(Scheduler(allocator, bounds), self.runner, self.runner.clock)
        self.streams: dict[str, list[int]] = {}
        self.specs: dict[str, Generate] = {}
        self.cached: dict[str, int] = {}
        self.failed: set[str] = set()
        self.seen: set[str] = set()  # whose answers have been compared

    def send(self, name: str, prompt: list[int], max_tokens: int = 4, **more: object) -> None:
        sampling = Sampling(seed=len(self.specs))
        spec = Generate(request_id=name, prompt=prompt, max_tokens=max_tokens, sampling=sampling, **more)  # type: ignore[arg-type]
        assert self.engine.submit(spec) is None
        self.specs[name], self.streams[name] = spec, []

    def step(self) -> None:
        for news in self.engine.step():
            if isinstance(news, Failed):
                self.failed.add(news.request_id)
                continue
            for update in news.updates:
                self.streams[update.request_id] += update.tokens
                self.cached[update.request_id] = update.cached
        self.engine.scheduler.check()

    def drain(self) -> None:
        """Step until nothing is left; every answer is the plain one."""
        while self.engine.has_work:
            self.step()
        for name, stream in self.streams.items():
            spec = self.specs[name]
            if name in self.seen:
                continue
            self.seen.add(name)
            plain = expected_stream(spec, spec.sampling.seed or 0, self.runner._vocabulary, windows=self.windows)
            assert stream == plain or (name in self.failed and stream == plain[: len(stream)]), name

    def ask(self, name: str, prompt: list[int], max_tokens: int = 4, **more: object) -> int:
        """Ask one question to its end; how many tokens were computed for it."""
        before = self.runner.computed_tokens
        self.send(name, prompt, max_tokens, **more)
        self.drain()
        return self.runner.computed_tokens - before


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("kinds", ["alone", "beside"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_a_second_question_about_a_long_document_reads_the_question(kinds: States, overlaps: bool) -> None:
    bench, document = Bench(kinds=kinds, overlaps=overlaps), text(65536, 1)
    first = bench.ask("first", document + text(60, 2))
    assert first >= 65596
    bench.ask("second", document + text(70, 3))
    assert bench.cached["second"] >= 0.99 * len(bench.specs["second"].prompt)
    bench.ask("again", document + text(60, 2))
    assert bench.cached["again"] >= 0.995 * len(bench.specs["again"].prompt)


def test_a_longer_question_finds_a_border_further_back_and_leaves_one_where_it_has_parted() -> None:
    bench, document = Bench(), text(64000, 1)
    bench.ask("first", document + text(3000, 2))
    bench.ask("second", document + text(3000, 3))
    assert 0.8 * 64000 < bench.cached["second"] < 63000
    bench.ask("third", document + text(3000, 4))
    assert bench.cached["third"] == 64000, "the second has left a copy there"


def test_questions_that_come_together_share_the_document() -> None:
    bench, document = Bench(), text(30000, 1)
    for name in "abcd":
        bench.send(name, document + text(50, ord(name)))
    bench.drain()
    assert bench.runner.computed_tokens < 1.05 * 30000 + 4 * 200


def test_a_question_that_comes_while_the_document_is_read_has_all_of_it_shared() -> None:
    bench, document = Bench(), text(30080, 1)
    bench.send("first", document + text(5000, 2))
    bench.step()
    bench.send("second", document + text(5000, 3))
    bench.drain()
    assert bench.cached["second"] == 30080


def test_a_shorter_question_waits_for_who_reads_the_document() -> None:
    bench, document = Bench(step=1024), text(6016, 1)
    bench.send("first", document + text(500, 2))
    bench.step()
    bench.send("second", document + text(50, 3))  # it would come first: it has less to read
    bench.drain()
    assert bench.cached["second"] == 6016
    assert bench.runner.computed_tokens < 6016 + 500 + 50 + 2 * PAGE


def test_copies_of_a_short_prompt_read_it_once() -> None:
    bench, prompt = Bench(), text(900, 1)
    for name in "abcd":
        bench.send(name, prompt)
    bench.drain()
    assert bench.runner.computed_tokens < 900 + 4 * 20


def test_a_conversation_of_ten_turns_reads_what_is_new() -> None:
    bench, history = Bench(), text(5000, 0)
    for turn in range(10):
        new = text(300, 100 + turn)
        history = history + new
        read = bench.ask(f"turn {turn}", history, max_tokens=200)
        if turn:
            assert read < 300 + 200 + 2 * PAGE, f"turn {turn} has read {read} tokens"
        history = history + bench.streams[f"turn {turn}"]


def test_a_few_copies_are_enough_for_a_conversation() -> None:
    bench, history = Bench(slots=8, rows=1), text(5000, 0)
    for turn in range(10):
        history = history + text(300, 100 + turn)
        read = bench.ask(f"turn {turn}", history, max_tokens=200)
        assert not turn or read < 300 + 200 + 2 * PAGE, f"turn {turn} has read {read} tokens"
        history = history + bench.streams[f"turn {turn}"]


def test_a_retry_goes_on_where_the_cancelled_one_was() -> None:
    bench, prompt = Bench(), text(60000, 1)
    bench.send("first", prompt)
    for _ in range(5):
        bench.step()
    bench.engine.cancel("first")
    del bench.streams["first"]
    bench.drain()
    done = bench.runner.computed_tokens
    assert done >= 4 * 8000
    read = bench.ask("retry", prompt)
    assert read <= 60000 + 4 - done + 2 * PAGE


def test_a_preempted_answer_comes_back_to_its_last_border() -> None:
    bench = Bench(pages=44, rows=3, slots=20, step=512, promised_tokens=0)
    for index in range(3):
        bench.send(f"r{index}", text(1500, index), max_tokens=400)
    bench.drain()
    assert bench.engine.scheduler.preemptions
    assert bench.runner.computed_tokens < 3 * 1900 + bench.engine.scheduler.preemptions * 600


def test_a_request_waits_for_slots_and_all_end() -> None:
    bench = Bench(slots=2 * SLOTS_PER_REQUEST, rows=8)
    for index in range(6):
        bench.send(f"r{index}", text(500, index), max_tokens=20)
    most = 0
    while bench.engine.has_work:
        bench.step()
        most = max(most, len(bench.engine.scheduler.running))
    bench.drain()
    assert most == 2


@pytest.mark.parametrize("overlaps", [True, False])
def test_drafts_that_do_not_stand_are_forgotten_with_their_slot(overlaps: bool) -> None:
    bench = Bench(overlaps=overlaps, page=4, kinds="alone")
    period = [1, 0, 2, 1, 1, 0] * 20
    bench.send("a", period, max_tokens=120, speculate=4)
    bench.send("b", period[3:], max_tokens=120, speculate=3)
    redone = 0
    while bench.engine.has_work:
        bench.step()
        redone += sum(request.redo for request in bench.engine.scheduler.running.values())
    bench.drain()
    assert redone, "some drafts stood, and some did not"


def test_without_a_prefix_cache_there_are_no_copies() -> None:
    bench = Bench(caches=False)
    assert bench.ask("first", text(3000, 1)) == bench.ask("second", text(3000, 1))
    assert bench.states.usage.copies == 0


def test_a_copy_and_one_requests_slots_are_the_least() -> None:
    with pytest.raises(ValueError, match="a request needs 2 slots and one to start from, got 2"):
        StateAllocator(StatePool(2), PAGE, copies=True)
    bench, history = Bench(slots=3), text(3000, 0)
    for turn in range(3):
        history = history + text(300, 100 + turn)
        read = bench.ask(f"turn {turn}", history, max_tokens=200)
        assert not turn or read < 300 + 200 + 2 * PAGE, f"turn {turn} has read {read} tokens"
        history = history + bench.streams[f"turn {turn}"]


def test_answers_leave_half_of_the_room_to_documents() -> None:
    bench, document = Bench(slots=26, rows=8), text(30000, 1)
    bench.ask("first", document + text(50, 2))
    for index in range(8):
        bench.send(f"r{index}", text(300, index), max_tokens=300)
    bench.drain()
    bench.ask("second", document + text(50, 3))
    assert bench.cached["second"] > 29000


def test_a_step_that_fails_is_computed_again_in_parts_from_the_states_before_it() -> None:
    bench = Bench(overlaps=False)
    logging.getLogger("longreach.engine.step_retry").setLevel(logging.CRITICAL)
    for index in range(4):
        bench.send(f"r{index}", text(300, index), max_tokens=20)

    def fail(plan: object) -> None:
        if len(plan.chunks) > 1 and bench.runner.steps % 3 == 0:  # type: ignore[attr-defined]
            raise RuntimeError("on purpose, after everything has been written")

    bench.runner.after_step = fail
    bench.drain()
    assert not bench.failed
    logging.getLogger("longreach.engine.step_retry").setLevel(logging.NOTSET)


def test_nobody_starts_from_what_a_failed_request_has_left() -> None:
    bench, prompt = Bench(), text(20000, 1)
    bench.send("broken", prompt)
    bench.runner.broken.add("broken")
    bench.drain()
    assert bench.failed == {"broken"}
    assert bench.states.usage.copies == 0
    assert bench.ask("next", prompt) >= 20000


def kept_apart(places: int = 1000, slots: int = 4, rows: int = 1, **limits: float) -> tuple[Bench, list[list[int]]]:
    """Four documents that have been read one after the other, with slots for the copy of one and pages for another."""
    bench = Bench(slots=slots, rows=rows, pages=100, step=1024, host=HostTier(places, 24), **limits)
    documents = [text(8000, index) for index in range(4)]
    for index, document in enumerate(documents):
        assert bench.ask(f"first {index}", document + text(50, 100 + index)) > 8000
    return bench, documents


@pytest.mark.parametrize("restored", [1, 30, 200])
def test_a_copy_that_was_evicted_comes_back_from_host_memory(restored: int) -> None:
    """As much in each step as may come beside answers; a state takes 24 places and is not cut."""
    bench, documents = kept_apart(restored_pages=restored)

    def within_bounds(moves: CacheMoves) -> None:
        assert sum(len(copy.places) for copy in moves.restored) <= max(restored, 24)

    bench.runner.before_move = within_bounds
    for turn in range(2):
        for index, document in enumerate(documents):
            name = f"{turn}{index}"
            assert bench.ask(name, document + text(50, 200 + 4 * turn + index)) < 128 + 2 * PAGE
            assert bench.cached[name] >= 7800
    stats = bench.engine.stats
    assert stats.restored_states == 8
    assert 4 <= stats.host_state_copies <= stats.stored_states < 20
    assert stats.restored_pages >= 8 * 60
    assert stats.used_host_pages == stats.stored_pages + 24 * stats.host_state_copies, "none was given up"


@pytest.mark.parametrize("restored", [10, 200])
def test_a_copy_in_host_memory_serves_all_who_wait_for_it(restored: int) -> None:
    bench, documents = kept_apart(restored_pages=restored, slots=7, rows=3)
    for index in range(5):
        bench.ask(f"more {index}", text(1300, 10 + index))
    for name in "abc":
        bench.send(name, documents[0] + text(40, ord(name)))
    bench.drain()
    assert min(bench.cached[name] for name in "abc") >= 7800
    assert bench.engine.stats.restored_states == 1
    assert bench.engine.stats.restored_pages <= 7800 // PAGE + 1, "each page comes once"


def test_pages_that_come_before_their_border_leave_with_their_request() -> None:
    bench, documents = kept_apart(restored_pages=10, slots=7, rows=2)
    bench.send("first", documents[0] + text(50, 1))
    bench.send("second", documents[0] + text(60, 2))
    for _ in range(4):
        bench.step()
    assert bench.engine.scheduler.running["first"].hold.ahead
    bench.engine.cancel("first")
    del bench.streams["first"]
    bench.step()
    bench.drain()
    assert bench.cached["second"] >= 7800
    assert not bench.engine.scheduler.running


def test_who_loses_the_border_ahead_reads_from_where_it_stands() -> None:
    bench, documents = kept_apart(restored_pages=10)
    bench.send("first", documents[0] + text(50, 1))
    for _ in range(4):
        bench.step()
    [request] = bench.engine.scheduler.running.values()
    assert request.hold.ahead
    assert bench.host is not None
    bench.host.remove(key(digest, STATE_GROUP) for digest in request.hold.digests)
    bench.drain()
    assert bench.cached["first"] == 0


def test_the_bound_holds_for_pages_and_copies_together() -> None:
    bench, documents = kept_apart(places=200, restored_pages=200)
    stats = bench.engine.stats
    assert stats.used_host_pages <= stats.host_pages == 200
    assert bench.ask("last", documents[3] + text(50, 1)) < 400
    assert bench.ask("second last", documents[2] + text(50, 2)) < 400
    assert bench.ask("first again", documents[0] + text(50, 3)) > 8000, "it was used longest ago"


def test_what_comes_back_is_not_given_up_for_what_it_pushes_out() -> None:
    bench, documents = kept_apart(slots=5, rows=2, restored_pages=200)
    bench.send("writer", text(20, 9), max_tokens=100)
    for _ in range(4):
        bench.step()
    host = bench.host
    assert host is not None
    assert bench.states.usage.free == 1, "which the writer takes, so that a copy that comes back pushes out another"
    copies = list(bench.states._pool._slot_of)
    host.remove(key(digest, STATE_GROUP) for digest in copies)
    for number in range(host.index.num_places - host.index.num_used):
        host.index.save(b"%d" % number)
    host.index.unpin()
    bench.send("again", documents[0] + text(50, 1))
    bench.drain()
    assert bench.cached["again"] >= 7800
    assert any(key(digest, STATE_GROUP) in host for digest in copies), "in place of what is older than it"


def test_a_copy_that_cannot_be_brought_back_costs_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    bench, documents = kept_apart(restored_pages=200)
    failed: list[CacheMoves] = []

    def fail(moves: CacheMoves) -> None:
        if not failed and any(copy.is_state for copy in moves.restored):
            failed.append(moves)
            raise RuntimeError("the copy failed, on purpose")

    bench.runner.before_move = fail
    bench.ask("failed", documents[0] + text(50, 1))
    assert bench.failed == {"failed"}
    assert bench.ask("retry", documents[0] + text(50, 1)) > 1000, "nobody gets what was not copied"
    bench.ask("other", documents[1] + text(50, 1))
    assert bench.failed == {"failed"}


def test_what_a_failed_request_has_left_is_not_in_host_memory_either() -> None:
    bench = Bench(slots=4, rows=1, host=HostTier(1000, 24))
    bench.send("broken", text(9000, 1), max_tokens=600)
    for _ in range(300):
        bench.step()
    assert bench.engine.stats.host_state_copies
    bench.runner.broken.add("broken")
    bench.drain()
    assert bench.engine.stats.host_state_copies == 0


def test_copies_of_one_answer_do_not_fill_host_memory() -> None:
    bench = Bench(slots=3, rows=1, host=HostTier(1000, 24))
    bench.ask("first", text(3000, 1), max_tokens=1500)
    assert bench.engine.stats.host_state_copies <= 2
