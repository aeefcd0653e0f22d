"""Requests of a batch: they come after all others, and give way to who cannot be let in."""

from __future__ import annotations

from tests.server.engine.test_scheduler import make, request, run_step


def test_flexible_requests_come_after_all_others_and_are_preempted_first() -> None:
    scheduler = make()
    scheduler.add(request("batch", 5, flexible=True, priority=-1))
    scheduler.add(request("later", 30, arrived=9.0, priority=1))
    assert run_step(scheduler) == {"later": 16}
    assert run_step(scheduler) == {"later": 14, "batch": 2}

    scheduler = make(num_pages=8, promised=0)
    scheduler.add(request("batch", 8, max_tokens=12, flexible=True, priority=-1))
    assert run_step(scheduler) == {"batch": 8}
    scheduler.add(request("later", 16, max_tokens=12, arrived=9.0))
    while not scheduler.preemptions:
        run_step(scheduler)
    assert [*scheduler.waiting] == ["batch"]


def test_flexible_requests_give_way_to_who_cannot_be_let_in() -> None:
    """The last of them, once no step is in flight; it keeps its tokens, and comes back when there is room."""
    scheduler = make(seqs=2)
    first, last = (request(n, 5, max_tokens=6, arrived=t, flexible=True) for n, t in (("first", 0.0), ("last", 1.0)))
    scheduler.add(first)
    scheduler.add(last)
    for token in (1, 2):
        assert len(run_step(scheduler, token)) == 2
    scheduler.add(request("urgent", 3, max_tokens=2, arrived=9.0))
    assert run_step(scheduler, 3) == {"first": 1, "last": 1}  # that there is no place is seen here
    ahead = scheduler.plan()
    assert ahead is not None
    assert {chunk.request.id for chunk in ahead.chunks} == {"first", "urgent"}
    assert (last.preempted, first.preempted) == (True, False)
    scheduler.advance(ahead)
    scheduler.settle({chunk.request.id: [4] * chunk.num_draws for chunk in ahead.chunks})
    while scheduler.has_work:
        run_step(scheduler, 5)
    assert last.tokens[5:] == [1, 2, 3, 5, 5, 5], "what was drawn before was lost"
    assert scheduler.preemptions == 1


def test_who_gives_way_is_not_taken_out_of_a_step_in_flight() -> None:
    scheduler = make(seqs=1)
    batch = request("batch", 5, max_tokens=6, flexible=True)
    scheduler.add(batch)
    run_step(scheduler)
    scheduler.add(request("urgent", 3, max_tokens=2))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.advance(plan)
    assert (scheduler.plan(), batch.seq_slot) == (None, 0)
    scheduler.settle({"batch": [7]})
    assert set(run_step(scheduler)) == {"urgent"}
    assert batch.seq_slot < 0
    assert [chunk.request.id for chunk in plan.chunks] == ["batch"]


def test_flexible_requests_give_their_pages_and_nobody_else_does() -> None:
    scheduler = make(num_pages=10, promised=4)
    scheduler.add(request("long", 12, max_tokens=8))
    scheduler.add(request("batch", 12, max_tokens=8, flexible=True))
    run_step(scheduler)
    run_step(scheduler)
    assert set(scheduler.running) == {"long", "batch"}
    scheduler.add(request("urgent", 14, max_tokens=2, arrived=9.0))
    scheduler.add(request("other", 14, max_tokens=2, arrived=9.0, flexible=True))
    run_step(scheduler)
    assert set(run_step(scheduler)) == {"long", "urgent"}
    assert set(scheduler.waiting) == {"batch", "other"}
    while "urgent" in scheduler.running:
        run_step(scheduler)
    assert "long" in scheduler.running
    scheduler.add(request("huge", 34, max_tokens=2, arrived=9.0))
    for _ in range(3):
        assert set(run_step(scheduler)) == {"long"}, "even alone it would have too few"
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.preemptions == 1, "nobody else gives way"
