"""The queue's bounds, and when a caller that was refused should come again."""

from __future__ import annotations

import pytest
from longreach.engine.admission import Admission
from longreach.engine.errors import QueueFullError
from longreach.engine.messages import Update
from longreach.engine.step_time import StepCost


def update(name: str, computed: int, prompt: int = 100) -> Update:
    return Update(request_id=name, prompt_tokens=prompt, computed=computed)


def test_requests_wait_until_their_first_update() -> None:
    queue = Admission(2, 1000, 10)
    queue.enter({"a": 100})
    queue.enter({"b": 100})
    with pytest.raises(QueueFullError, match="lets 2 requests and 1000 tokens wait"):
        queue.enter({"c": 1})
    queue.progress(update("a", 10))
    queue.progress(update("a", 20))
    queue.progress(update("never was", 20))
    assert (queue.waiting_requests, queue.waiting_tokens) == (1, 100)
    queue.enter({"c": 1})
    queue.leave("a")
    queue.leave("b")
    queue.leave("c")
    assert (queue.waiting_requests, queue.waiting_tokens, queue.prefill_seconds()) == (0, 0, 0)


def test_unread_tokens_are_those_of_all_prompts_that_are_not_computed() -> None:
    queue = Admission(10, 1000, 10)
    assert queue.unread_tokens == 0
    queue.enter({"a": 100, "b": 50})
    queue.progress(update("a", 30))
    assert queue.unread_tokens == 120  # one that has begun waits no more, but is not read
    queue.progress(update("a", 100))
    queue.leave("b")
    assert queue.unread_tokens == 0


def test_prompt_tokens_are_bounded_but_an_empty_queue_takes_any_prompt() -> None:
    queue = Admission(10, 150, 10)
    queue.enter({"giant": 1000})
    with pytest.raises(QueueFullError):
        queue.enter({"a": 1})
    queue.progress(update("giant", 10, prompt=1000))
    queue.enter({"a": 100})
    with pytest.raises(QueueFullError):
        queue.enter({"b": 51})
    queue.enter({"b": 50})


def test_requests_that_belong_together_enter_together_or_not_at_all() -> None:
    queue = Admission(3, 150, 10)
    queue.enter({"a-0": 100, "a-1": 100})  # more than may wait, but nobody was before them
    assert (queue.waiting_requests, queue.waiting_tokens) == (2, 200)
    queue.leave("a-1")
    for refused in ({"b-0": 10, "b-1": 41}, {"b-0": 1, "b-1": 1, "b-2": 1}):
        with pytest.raises(QueueFullError, match="1 requests with 100 prompt tokens"):
            queue.enter(refused)
        assert "b-0" not in queue
    queue.enter({"b-0": 10, "b-1": 40})
    assert "b-1" in queue


def test_the_time_to_come_again_is_what_is_left_to_read() -> None:
    queue = Admission(2, 10**6, 100)
    queue.cost = StepCost(per_step=0.0, per_token=0.01, per_pair=0.0, per_key=0.0)
    queue.enter({"reading": 1000})
    queue.progress(update("reading", 400, prompt=1000))
    queue.enter({"answering": 500})
    queue.progress(update("answering", 500, prompt=500))
    queue.enter({"b": 300})
    queue.enter({"c": 120})
    with pytest.raises(QueueFullError) as full:
        queue.enter({"d": 1})
    assert full.value.retry_after == 11  # 600 + 300 + 120 tokens at 10 ms, rounded up
    queue.cost = StepCost(0.0, 0.0, 0.0, 0.0)
    with pytest.raises(QueueFullError) as full:
        queue.enter({"d": 1})
    assert full.value.retry_after == 1


def test_the_time_to_read_one_prompt_is_known_once_steps_have_been_measured() -> None:
    queue = Admission(5, 10**6, 100)
    queue.enter({"a": 1000})
    queue.enter({"b": 300})
    assert queue.seconds_to_read("a") is None, "nothing has been measured"
    queue.cost = StepCost(per_step=0.0, per_token=0.01, per_pair=0.0, per_key=0.0)
    queue.progress(update("a", 400, prompt=1000))
    assert queue.seconds_to_read("a") == pytest.approx(6.0)
    assert queue.seconds_to_read("b") == pytest.approx(3.0)
    assert queue.seconds_to_read("gone") is None
