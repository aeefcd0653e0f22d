"""The scheduler and its pages: what a step contains, and that nothing is ever lost, whatever happens in which order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from longreach.engine.messages import Generate
from longreach.engine.pages import PagePool
from longreach.engine.request import Request
from longreach.engine.scheduler import Limits, Scheduler

PAGE = 4


def make(num_pages: int = 64, seqs: int = 8, budget: int = 16, model_len: int = 128) -> Scheduler:
    return Scheduler(PagePool(num_pages, PAGE), Limits(seqs, budget, model_len))


def request(name: str, prompt: int, max_tokens: int = 4, **more) -> Request:
    spec = Generate(request_id=name, prompt=list(range(prompt)), max_tokens=max_tokens, **more)
    return Request.of(spec, seed=0)


def run_step(scheduler: Scheduler, token: int = 7) -> dict[str, int]:
    """Plan and commit one step in which every drawn token is `token`; the length of each request's chunk."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, {chunk.request.id: token for chunk in plan.chunks if chunk.draws})
    scheduler.check()
    return {chunk.request.id: chunk.length for chunk in plan.chunks}


def test_a_long_prompt_is_read_in_chunks_of_the_budget_and_then_one_token_at_a_time() -> None:
    scheduler = make()
    only = request("a", 40, max_tokens=3)
    scheduler.add(only)
    steps = []
    while scheduler.has_work:
        steps.append(run_step(scheduler)["a"])
    assert steps == [16, 16, 8, 1, 1]
    assert only.tokens[40:] == [7, 7, 7]
    assert only.finish_reason == "length"
    assert scheduler.pool.num_available == 64


def test_decodes_are_never_left_out_and_prompts_share_the_rest_evenly() -> None:
    scheduler = make()
    scheduler.add(request("running", 3, max_tokens=20))
    assert run_step(scheduler) == {"running": 3}
    scheduler.add(request("long", 60))
    scheduler.add(request("short", 5))
    assert run_step(scheduler) == {"running": 1, "short": 5, "long": 10}
    assert run_step(scheduler) == {"running": 1, "short": 1, "long": 14}


def test_the_oldest_waits_for_its_pages_and_nobody_overtakes_it() -> None:
    scheduler = make(num_pages=10)
    for name, prompt in [("first", 25), ("big", 30), ("small", 2)]:
        scheduler.add(request(name, prompt, max_tokens=2))
    assert set(run_step(scheduler)) == {"first"}
    while "first" in scheduler.running:
        assert set(run_step(scheduler)) == {"first"}
    assert set(run_step(scheduler)) == {"big", "small"}


def test_a_stop_token_ends_a_request_but_not_before_min_tokens() -> None:
    scheduler = make()
    early = request("early", 2, max_tokens=9, stop_token_ids=[7])
    late = request("late", 2, max_tokens=9, stop_token_ids=[7], min_tokens=2)
    scheduler.add(early)
    scheduler.add(late)
    run_step(scheduler)
    assert early.finish_reason == "stop"
    assert late.finish_reason is None
    run_step(scheduler)
    run_step(scheduler)
    assert late.finish_reason == "stop"
    assert late.generated == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (request("a", 0), "the prompt is empty"),
        (request("a", 5, max_tokens=0), "max_tokens must be at least 1"),
        (request("a", 120, max_tokens=9), "exceed the context of 128 tokens"),
    ],
)
def test_what_can_never_run_is_refused(spec: Request, message: str) -> None:
    scheduler = make()
    with pytest.raises(ValueError, match=message):
        scheduler.add(spec)
    assert not scheduler.has_work


def test_a_request_larger_than_all_pages_is_refused_and_does_not_block_the_queue() -> None:
    scheduler = make(num_pages=4)
    with pytest.raises(ValueError, match="do not fit into the KV cache of 16 tokens"):
        scheduler.add(request("huge", 20))
    scheduler.add(request("fits", 13))  # the last of its 17 tokens is never stored
    assert run_step(scheduler) == {"fits": 13}


def test_limits_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_seqs \(9\) must be at least 1 and at most max_batched_tokens"):
        Limits(9, 8, 100)


def test_a_request_removed_while_its_step_runs_is_not_touched_by_the_commit() -> None:
    scheduler = make()
    gone, stays = request("gone", 3), request("stays", 3)
    scheduler.add(gone)
    scheduler.add(stays)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.remove("gone") is gone
    scheduler.commit(plan, {"stays": 1, "gone": 1})
    scheduler.check()
    assert (gone.generated, stays.generated) == (0, 1)
    assert scheduler.remove("gone") is None


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of any size come, run, and are cancelled at any moment; after each call nothing is lost."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make(num_pages=24, seqs=4, budget=6, model_len=80)
        self.alive: dict[str, Request] = {}
        self.names = iter(range(10**6))

    @rule(target=requests, prompt=st.integers(1, 70), max_tokens=st.integers(1, 12), stops=st.booleans())
    def add(self, prompt: int, max_tokens: int, stops: bool):
        new = request(f"r{next(self.names)}", prompt, max_tokens, stop_token_ids=[1] if stops else [])
        if prompt + max_tokens > 80:
            with pytest.raises(ValueError, match="context"):
                self.scheduler.add(new)
            return multiple()
        self.scheduler.add(new)
        self.alive[new.id] = new
        return new

    @rule(victim=consumes(requests))
    def cancel(self, victim: Request) -> None:
        expected = victim if victim.finish_reason is None else None
        assert self.scheduler.remove(victim.id) is expected
        self.alive.pop(victim.id, None)

    @rule(token=st.integers(0, 3))
    def step(self, token: int) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            assert not self.alive, "requests are waiting and nothing is planned"
            return
        assert plan.num_tokens <= 6
        assert {c.request.id for c in plan.chunks} == set(self.scheduler.running), "a running request got no token"
        before = {chunk.request.id: chunk.request.computed for chunk in plan.chunks}
        self.scheduler.commit(plan, {chunk.request.id: token for chunk in plan.chunks if chunk.draws})
        for chunk in plan.chunks:
            assert chunk.request.computed == before[chunk.request.id] + chunk.length
        self.alive = {name: r for name, r in self.alive.items() if r.finish_reason is None}

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check()
        here = set(self.scheduler.running) | {r.id for r in self.scheduler.waiting}
        assert here == set(self.alive)

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            run_step(self.scheduler)
        assert self.scheduler.pool.num_available == self.scheduler.pool.num_pages, "pages leaked, or a request is stuck"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
