"""The queue's bounds, and when a caller that was refused should come again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from longreach.engine.admission import Admission, Place, most_queued_tokens
from longreach.engine.cost_model import StepCost
from longreach.engine.errors import QueueFullError
from longreach.engine.updates import Update


def update(name: str, computed: int, prompt: int = 100) -> Update:
    return Update(request_id=name, prompt_tokens=prompt, computed=computed)


def places(**prompts: int) -> dict[str, Place]:
    return {name: Place(tokens) for name, tokens in prompts.items()}


def copies(name: str, count: int, tokens: int) -> dict[str, Place]:
    return {f"{name}{i}": Place(tokens, copy_of=None if i == 0 else f"{name}0") for i in range(count)}


def test_requests_wait_until_their_first_update() -> None:
    queue = Admission(2, 1000, 10)
    queue.enter({"a": Place(100)})
    queue.enter({"b": Place(100)})
    with pytest.raises(QueueFullError, match="lets 2 requests and 1000 tokens wait"):
        queue.enter({"c": Place(1)})
    queue.progress(update("a", 10))
    queue.progress(update("a", 20))
    queue.progress(update("never was", 20))
    assert (queue.waiting_requests, queue.waiting_tokens) == (1, 100)
    queue.enter({"c": Place(1)})
    queue.leave("a")
    queue.leave("b")
    queue.leave("c")
    assert (queue.waiting_requests, queue.waiting_tokens, queue.prefill_seconds()) == (0, 0, 0)


def test_unread_tokens_are_those_of_all_prompts_that_are_not_computed() -> None:
    queue = Admission(10, 1000, 10)
    assert queue.unread_tokens == 0
    queue.enter({"a": Place(100), "b": Place(50)})
    queue.progress(update("a", 30))
    assert queue.unread_tokens == 120  # one that has begun waits no more, but is not read
    queue.progress(update("a", 100))
    queue.leave("b")
    assert queue.unread_tokens == 0


def test_prompt_tokens_are_bounded_but_an_empty_queue_takes_any_prompt() -> None:
    queue = Admission(10, 150, 10)
    queue.enter({"giant": Place(1000)})
    with pytest.raises(QueueFullError):
        queue.enter({"a": Place(1)})
    queue.progress(update("giant", 10, prompt=1000))
    queue.enter({"a": Place(100)})
    with pytest.raises(QueueFullError):
        queue.enter({"b": Place(51)})
    queue.enter({"b": Place(50)})


def test_requests_that_belong_together_enter_together_or_not_at_all() -> None:
    queue = Admission(3, 150, 10)
    with pytest.raises(QueueFullError):
        queue.enter(places(a0=100, a1=100))  # an empty queue takes one prompt of any length, not several
    queue.enter(places(a0=100))
    for refused in (places(b0=10, b1=41), places(b0=1, b1=1, b2=1)):
        with pytest.raises(QueueFullError, match="1 requests with 100 prompt tokens"):
            queue.enter(refused)
        assert "b0" not in queue
    queue.enter(places(b0=10, b1=40))
    assert "b1" in queue


def test_copies_of_a_prompt_wait_but_their_prompt_counts_once() -> None:
    queue = Admission(256, 1 << 20, 8192)
    queue.cost = StepCost(per_step=0.0, per_token=0.01, per_pair=0.0, per_key=0.0)
    queue.enter(copies("a", 16, 100_000))
    assert (queue.waiting_requests, queue.waiting_tokens, queue.unread_tokens) == (16, 100_000, 100_000)
    assert queue.prefill_seconds() == pytest.approx(1000)
    assert queue.seconds_to_read("a0") == pytest.approx(1000)
    assert queue.seconds_to_read("a1") == 0, "it is read with the first"
    queue.progress(update("a0", 40_000, prompt=100_000))
    assert (queue.waiting_requests, queue.waiting_tokens, queue.unread_tokens) == (15, 0, 60_000)
    queue.enter(places(other=100_000), caller="somebody else")


def test_a_prompt_counts_as_long_as_anybody_is_to_read_it() -> None:
    queue = Admission(10, 1000, 10)
    queue.enter(copies("a", 3, 100))
    queue.leave("a0")  # nothing was computed: the others read it
    assert (queue.waiting_requests, queue.waiting_tokens, queue.unread_tokens) == (2, 100, 100)
    queue.progress(update("a1", 60))
    queue.leave("a1")
    assert (queue.waiting_requests, queue.waiting_tokens, queue.unread_tokens) == (1, 0, 40)
    queue.progress(update("a2", 50))  # as far as its first 50 tokens are its own, the pages behind them are there
    assert queue.unread_tokens == 40
    queue.leave("a2")
    assert (queue.waiting_requests, queue.waiting_tokens, queue.unread_tokens) == (0, 0, 0)


def test_a_preempted_request_reads_its_prompt_again() -> None:
    queue = Admission(10, 1000, 10)
    queue.enter(places(a=100))
    queue.progress(update("a", 100))
    queue.progress(update("a", 10))
    assert queue.unread_tokens == 90


def test_without_a_prefix_cache_each_copy_is_read() -> None:
    queue = Admission(10, 1000, 10, shares_prompts=False)
    queue.enter(copies("a", 3, 100))
    assert (queue.waiting_tokens, queue.unread_tokens) == (300, 300)
    queue.progress(update("a1", 60))
    assert (queue.waiting_tokens, queue.unread_tokens) == (200, 240)


def test_one_caller_alone_does_not_keep_the_others_out() -> None:
    queue = Admission(16, 800, 10)
    for number in range(16):
        queue.enter({f"a{number}": Place(50)}, caller="a")
    for bounded in (Place(1), Place(100)):
        with pytest.raises(QueueFullError):
            queue.enter({"a": bounded}, caller="a")
    with pytest.raises(QueueFullError):
        queue.enter({"b": Place(101)}, caller="b")  # more than an eighth of the tokens
    with pytest.raises(QueueFullError):
        queue.enter(places(b0=1, b1=1, b2=1), caller="b")  # of the requests
    queue.enter(places(b0=50, b1=50), caller="b")
    with pytest.raises(QueueFullError):
        queue.enter(places(b2=1), caller="b")
    queue.enter(places(c0=1, c1=1), caller="c")
    with pytest.raises(QueueFullError):
        queue.enter(places(d0=1), caller="d")  # a quarter beyond the bound is all there is
    queue.leave("b0")
    queue.enter(places(d0=1), caller="d")


def test_what_may_wait_is_some_caches_unless_told_otherwise() -> None:
    assert (most_queued_tokens(None, 1000), most_queued_tokens(7, 1000)) == (4000, 7)


class Ledgers(RuleBasedStateMachine):
    """Groups of requests come, get on and leave in any order; the ledger is compared with plain counting."""

    @initialize(shares=st.booleans())
    def start(self, shares: bool) -> None:
        self.queue = Admission(20, 500, 10, shares_prompts=shares)
        self.shares = shares
        self.names = (f"r{number}" for number in range(10**6))
        self.here: dict[str, tuple[str, str, int]] = {}  # request -> prompt, caller, tokens
        self.begun: set[str] = set()  # requests
        self.read: dict[str, int] = {}  # prompt -> tokens computed

    @rule(
        lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3), n=st.integers(1, 5), caller=st.sampled_from("ab")
    )
    def come(self, lengths: list[int], n: int, caller: str) -> None:
        wanted, prompts = {}, {}
        for length in lengths:
            first = next(self.names)
            wanted[first], prompts[first] = Place(length), first
            for name in [next(self.names) for _ in range(n - 1)]:
                wanted[name] = Place(length, copy_of=first)
                prompts[name] = first if self.shares else name
        before = self.counted()
        try:
            self.queue.enter(wanted, caller=caller)
        except QueueFullError:
            assert self.counted() == before
            assert before[0] or len(set(prompts.values())) > 1, "an empty queue takes any one prompt"
            return
        self.here |= {name: (prompts[name], caller, place.prompt_tokens) for name, place in wanted.items()}

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def get_on(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        prompt, _, tokens = self.here[name]
        done = data.draw(st.integers(self.read.get(prompt, 0), tokens))
        self.queue.progress(update(name, done, prompt=tokens))
        self.begun.add(name)
        self.read[prompt] = done

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        del self.here[name]
        self.queue.leave(name)

    def counted(self) -> tuple[int, int, int]:
        waiting = sum(name not in self.begun for name in self.here)
        prompts = {prompt: tokens for prompt, _, tokens in self.here.values()}
        return (
            waiting,
            sum(tokens for prompt, tokens in prompts.items() if prompt not in self.read),
            sum(tokens - self.read.get(prompt, 0) for prompt, tokens in prompts.items()),
        )

    @invariant()
    def the_ledger_counts_as_one_would(self) -> None:
        queue = self.queue
        assert (queue.waiting_requests, queue.waiting_tokens, queue.unread_tokens) == self.counted()
        waiting = {caller for name, (_, caller, _) in self.here.items() if name not in self.begun}
        assert set(queue._of_callers) == waiting
        assert queue.waiting_requests <= 25

    def teardown(self) -> None:
        for name in list(self.here):
            self.queue.leave(name)
        assert (self.queue.waiting_requests, self.queue.waiting_tokens, self.queue.unread_tokens) == (0, 0, 0)
        assert not self.queue._entries
        assert not self.queue._of_callers


Ledgers.TestCase.settings = settings(max_examples=40)
TestLedgers = Ledgers.TestCase


def test_the_time_to_come_again_is_what_is_left_to_read() -> None:
    queue = Admission(2, 10**6, 100)
    queue.cost = StepCost(per_step=0.0, per_token=0.01, per_pair=0.0, per_key=0.0)
    queue.enter({"reading": Place(1000)})
    queue.progress(update("reading", 400, prompt=1000))
    queue.enter({"answering": Place(500)})
    queue.progress(update("answering", 500, prompt=500))
    queue.enter({"b": Place(300)})
    queue.enter({"c": Place(120)})
    with pytest.raises(QueueFullError) as full:
        queue.enter({"d": Place(1)})
    assert full.value.retry_after == 11  # 600 + 300 + 120 tokens at 10 ms, rounded up
    queue.cost = StepCost(0.0, 0.0, 0.0, 0.0)
    with pytest.raises(QueueFullError) as full:
        queue.enter({"d": Place(1)})
    assert full.value.retry_after == 1


def test_the_time_to_read_one_prompt_is_known_once_steps_have_been_measured() -> None:
    queue = Admission(5, 10**6, 100)
    queue.enter({"a": Place(1000)})
    queue.enter({"b": Place(300)})
    assert queue.seconds_to_read("a") is None, "nothing has been measured"
    queue.cost = StepCost(per_step=0.0, per_token=0.01, per_pair=0.0, per_key=0.0)
    queue.progress(update("a", 400, prompt=1000))
    assert queue.seconds_to_read("a") == pytest.approx(6.0)
    assert queue.seconds_to_read("b") == pytest.approx(3.0)
    assert queue.seconds_to_read("gone") is None
