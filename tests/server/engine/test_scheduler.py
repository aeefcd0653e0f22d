"""The scheduler: what a step contains, who waits for whom, and what is refused."""

from __future__ import annotations

import math

import pytest
from longreach.engine.cost_model import StepCost, StepTime
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.messages import Generate
from longreach.engine.requests.request import Request
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.priority import head_start, seniority
from longreach.engine.scheduling.scheduler import Scheduler

PAGE = 4


def make(
    num_pages: int = 64,
    seqs: int = 8,
    budget: int = 16,
    model_len: int = 128,
    cache: bool = False,
    max_itl: float = math.inf,
    promised: int = 1024,
) -> Scheduler:
    hasher = PageHasher(PAGE, "a model") if cache else None
    limits = Limits(seqs, budget, model_len, max_itl, promised_tokens=promised)
    return Scheduler(PageAllocator(PagePool(num_pages, PAGE), hasher), limits)


def request(name: str, prompt: int, max_tokens: int = 4, arrived: float = 0.0, **more) -> Request:
    spec = Generate(request_id=name, prompt=list(range(prompt)), max_tokens=max_tokens, **more)
    return Request.of(spec, seed=0, arrived=arrived)


def _known_time(seconds_per_token: float = 1.0) -> StepTime:
    return StepTime(StepCost(0.0, seconds_per_token, 0.0, 0.0))


def run_step(scheduler: Scheduler, token: int = 7) -> dict[str, int]:
    """Plan and commit one step in which every drawn token is `token`; the length of each request's chunk."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.advance(plan)
    scheduler.settle({chunk.request.id: [token] * chunk.num_draws for chunk in plan.chunks if chunk.num_draws})
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
    assert scheduler.allocator.num_available == 64


def test_decodes_are_never_left_out_and_the_shortest_prompt_goes_first() -> None:
    scheduler = make()
    scheduler.add(request("running", 3, max_tokens=20))
    assert run_step(scheduler) == {"running": 3}
    scheduler.add(request("long", 60))
    scheduler.add(request("short", 5))
    assert run_step(scheduler) == {"running": 1, "short": 5, "long": 10}
    assert run_step(scheduler) == {"running": 1, "short": 1, "long": 14}


def test_a_prompt_lets_shorter_ones_pass_for_a_while_and_no_longer() -> None:
    scheduler = make()
    scheduler.step_time = _known_time()  # a token takes a second: the 60 tokens let others pass for 480 seconds
    scheduler.add(long := request("long", 60))
    scheduler.add(request("soon", 16, arrived=300.0))
    scheduler.add(late := request("late", 16, arrived=500.0))
    assert [list(run_step(scheduler)) for _ in range(3)] == [["soon"], ["soon", "long"], ["soon", "long"]]
    while not long.generated:
        assert not late.computed
        run_step(scheduler)


def test_beside_streams_a_chunk_fits_into_the_time_that_is_left_but_never_vanishes() -> None:
    for max_itl, expected in [(60.0, {"stream": 1, "a": 20, "b": 19}), (1.0, {"stream": 1, "a": 16})]:
        scheduler = make(budget=50, max_itl=max_itl)
        scheduler.step_time = _known_time()
        scheduler.add(request("stream", 3, max_tokens=20))
        run_step(scheduler)
        scheduler.add(request("a", 20))
        scheduler.add(request("b", 19, arrived=100.0))
        assert run_step(scheduler) == expected
    scheduler = make(budget=50, max_itl=30.0)
    scheduler.step_time = _known_time()
    scheduler.add(request("stream", 3, max_tokens=20))
    run_step(scheduler)
    scheduler.add(request("a", 20))
    scheduler.add(request("b", 60, arrived=100.0))
    assert run_step(scheduler) == {"stream": 1, "a": 20}  # 6 tokens' time is left: not worth a chunk


def test_a_priority_is_worth_a_head_start_and_no_more() -> None:
    scheduler = make()
    scheduler.add(request("old", 10))
    scheduler.add(request("urgent", 40, arrived=5.0, priority=-1))
    assert run_step(scheduler) == {"urgent": 16}
    assert run_step(scheduler) == {"urgent": 16}
    scheduler.add(request("late", 10, arrived=6.0, priority=-1))
    assert run_step(scheduler) == {"urgent": 8, "old": 8}
    starts = [head_start(priority) for priority in range(-100, 101)]
    assert starts == sorted(starts)
    assert len(set(starts)) == 201
    assert [round(head_start(priority)) for priority in (-100, -10, -1, 0, 1, 10, 100)] == [-55, -30, -5, 0, 5, 30, 55]


def test_an_urgent_answer_keeps_its_pages_before_one_that_came_earlier() -> None:
    first, urgent, late = request("a", 4), request("b", 4, arrived=50.0, priority=-100), request("c", 4, arrived=60.0)
    assert sorted((late, first, urgent), key=seniority) == [urgent, first, late]


def test_who_is_next_waits_for_its_pages_and_nobody_overtakes_it() -> None:
    scheduler = make(num_pages=10)
    scheduler.add(request("first", 25, max_tokens=2))
    assert set(run_step(scheduler)) == {"first"}
    scheduler.step_time = _known_time()
    scheduler.add(request("big", 30, max_tokens=2))
    scheduler.add(request("small", 2, max_tokens=2, arrived=1000.0))
    while "first" in scheduler.running:
        assert set(run_step(scheduler)) == {"first"}
    assert set(run_step(scheduler)) == {"big"}


def test_a_prompt_is_let_in_only_when_its_turn_comes() -> None:
    scheduler = make(seqs=2)
    for name in ("a", "b"):
        scheduler.add(request(name, 60))
    run_step(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (1, 1)
    scheduler.add(request("short", 3))  # finds a place, although two long prompts came before it
    assert run_step(scheduler) == {"short": 3, "a": 13}


def test_a_prompt_takes_over_the_pages_of_an_earlier_one_but_computes_its_last_token() -> None:
    scheduler = make(cache=True)
    scheduler.add(request("first", 12))
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.allocator.num_available == 64
    for prompt, cached in [(12, 8), (13, 12), (14, 12), (40, 12), (3, 0)]:
        again = request("again", prompt)
        scheduler.add(again)
        run_step(scheduler)
        assert again.cached == cached, prompt
        assert scheduler.remove("again") is again
    assert scheduler.remove("again") is None


def test_a_salt_separates_what_is_cached() -> None:
    scheduler = make(cache=True)
    for name, salt in [("one", "a"), ("two", "b"), ("three", "a")]:
        scheduler.add(new := request(name, 12, cache_salt=salt))
        while scheduler.has_work:
            run_step(scheduler)
        assert new.cached == (8 if name == "three" else 0)


def test_of_identical_prompts_in_flight_one_is_computed_and_the_others_follow_it() -> None:
    scheduler = make(cache=True)
    same = [request(name, 50) for name in "abc"]
    for one in same:
        scheduler.add(one)
    lengths = [run_step(scheduler) for _ in range(4)]
    # "b" and "c" get the pages and compute only what comes after the last of them, page 11
    assert lengths == [{"a": 16}, {"a": 16}, {"a": 16}, {"a": 2, "b": 2, "c": 2}]
    assert [one.cached for one in same] == [0, 48, 48]
    assert same[1].pages[:12] == same[0].pages[:12]


def test_a_follower_goes_on_alone_when_its_leader_is_cancelled() -> None:
    scheduler = make(cache=True)
    leader, follower = request("a", 50), request("b", 50, arrived=1.0)
    scheduler.add(leader)
    run_step(scheduler)
    scheduler.add(follower)
    assert run_step(scheduler) == {"a": 16}
    scheduler.remove("a")
    scheduler.check()
    assert run_step(scheduler) == {"b": 16}
    assert follower.cached == 32


def test_what_failed_is_not_taken_over() -> None:
    scheduler = make(cache=True)
    scheduler.add(broken := request("broken", 50))
    run_step(scheduler)
    scheduler.discard(broken)
    scheduler.check()
    assert (scheduler.allocator.usage.free, scheduler.allocator.usage.cached) == (64, 0)


def test_drafts_that_are_drawn_stand_and_the_first_other_token_ends_them() -> None:
    scheduler = make()
    copy = request("a", 4, max_tokens=20, speculate=3)
    copy.tokens[:] = copy.spec.prompt[:] = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    scheduler.add(copy)
    assert run_step(scheduler, token=4) == {"a": 9}
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.chunks[0].drafts, plan.chunks[0].token_ids, plan.is_decode_only) == ((5, 6, 1), [4, 5, 6, 1], False)
    scheduler.advance(plan)
    scheduler.settle({"a": [5, 6, 9, 8]})
    scheduler.check()
    assert copy.tokens[9:] == [4, 5, 6, 9]
    assert copy.computed == 12


def test_drafts_never_pass_the_last_token_that_was_asked_for() -> None:
    scheduler = make()
    copy = request("a", 30, max_tokens=3, speculate=9)
    copy.tokens[:] = copy.spec.prompt[:] = [7] * 30
    scheduler.add(copy)
    steps = []
    while scheduler.has_work:
        steps.append(run_step(scheduler)["a"])
    assert steps == [16, 14, 2]
    assert (copy.tokens[30:], copy.finish_reason) == ([7, 7, 7], "length")


def test_answers_that_outgrow_their_promise_preempt_the_last_comer_once() -> None:
    scheduler = make(num_pages=12, budget=32, promised=2, cache=True)
    early, late = request("early", 10, max_tokens=30), request("late", 11, max_tokens=30, arrived=1.0)
    late.tokens[:] = late.spec.prompt[:] = [9] * 11
    scheduler.add(early)
    scheduler.add(late)
    preemptions, before = 0, False
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        preemptions += late.preempted and not before
        before = late.preempted
        drawn = {c.request.id: [len(c.request.tokens)] * c.num_draws for c in plan.chunks if c.num_draws}
        scheduler.advance(plan)
        scheduler.settle(drawn)
        scheduler.check()
        assert not early.preempted
        if late.seq_slot >= 0 and late.preempted:
            assert late.hold.reserved + len(late.pages) == 10
    assert preemptions == 1
    assert (early.generated, late.generated) == (30, 30)
    assert late.tokens[11:] == list(range(11, 41)), "what was drawn before the preemption was lost"
    assert late.cached == 0


def test_who_came_last_steps_back_itself_and_who_was_promised_its_end_is_left_alone() -> None:
    scheduler = make(num_pages=12, budget=32, promised=4)
    scheduler.add(short := request("short", 20, max_tokens=4, arrived=5.0))
    run_step(scheduler)
    scheduler.add(growing := request("growing", 20, max_tokens=28))
    while scheduler.has_work:
        run_step(scheduler)
    assert (growing.preempted, short.preempted) == (False, False)
    scheduler.add(short := request("short", 24, max_tokens=24, arrived=5.0))
    run_step(scheduler)
    scheduler.add(growing := request("growing", 16, max_tokens=32))
    while not short.preempted:
        run_step(scheduler)
    assert "growing" in scheduler.running
    while scheduler.has_work:
        run_step(scheduler)
    assert (growing.preempted, short.preempted) == (False, True)


def test_drafts_preempt_nobody() -> None:
    scheduler = make(num_pages=8, budget=32, promised=1)
    for name, arrived in (("a", 0.0), ("b", 1.0)):
        scheduler.add(new := request(name, 12, max_tokens=20, speculate=8, arrived=arrived))
        new.tokens[:] = new.spec.prompt[:] = [7] * 12
    run_step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    assert [len(chunk.drafts) for chunk in plan.chunks] == [3, 3]  # a page of 4 for each, which its token needs anyway


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
    with pytest.raises(ValueError, match=r"max_itl must be positive"):
        Limits(1, 8, 100, max_itl=0.0)
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
    scheduler.advance(plan)
    scheduler.settle({"stays": [1], "gone": [1]})
    scheduler.check()
    assert (gone.generated, stays.generated) == (0, 1)
    assert scheduler.remove("gone") is None


def test_the_longest_prompt_of_a_step_is_its_last() -> None:
    """Kernels begin with the last sequence, and a long one begun late would be computed beside nothing."""
    scheduler = make(budget=32)
    for name, length in (("a", 7), ("b", 12), ("c", 5)):
        scheduler.add(request(name, length))
    scheduler.add(request("stream", 1))
    run_step(scheduler)
    scheduler.add(request("d", 11, priority=-1))  # chosen first
    scheduler.add(request("e", 6))
    plan = scheduler.plan()
    assert plan is not None
    assert [chunk.length for chunk in plan.chunks] == [1, 1, 1, 1, 6, 11]


def test_a_step_that_is_cut_to_a_length_of_time_has_whole_tiles() -> None:
    """A GPU computes 128 rows as fast as one more than the last whole tile."""
    scheduler = make(num_pages=1024, budget=1024, model_len=2000, max_itl=378.0)
    scheduler.step_time = _known_time()
    scheduler.add(request("stream", 3, max_tokens=50))
    run_step(scheduler)
    scheduler.step_time = _known_time()
    scheduler.add(request("long", 1000))
    scheduler.add(request("next", 1001))  # gets nothing of what is left to the bound: it would need another tile
    assert run_step(scheduler) == {"stream": 1, "long": 256 - 8}
    scheduler.step_time = _known_time()
    scheduler.step_time.caution = 2.0
    assert run_step(scheduler) == {"stream": 1, "long": 128 - 8}
    scheduler.step_time = _known_time()
    scheduler.step_time.caution = 4.0
    assert run_step(scheduler) == {"stream": 1, "long": 89}, "less than a tile is not cut"
