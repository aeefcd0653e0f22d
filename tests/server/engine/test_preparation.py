"""Grammars are compiled beside the engine's steps: a slow one delays its own request and nobody else's."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLMatcher
from longreach.config import EMBEDDED_MODEL
from longreach.engine.client import EngineClient
from longreach.engine.errors import RequestFailedError
from longreach.engine.messages import Cancel, EngineConfig, Failed, Generate, Sampling
from longreach.engine.requests.request import Constraint
from longreach.engine.sampling.grammar import _KEPT, Grammars
from longreach.engine.sampling.grammar_threads import Preparation, Prepared
from longreach.engine.startup import engine_process as process

from tests.server.engine.places import admitted

TOKENIZER = EMBEDDED_MODEL / "tokenizer.json"


def spec(name: str, grammar: str | None = "good", max_tokens: int = 4, caller: str = "") -> Generate:
    return Generate(
        request_id=name,
        prompt=[5, 6, 7],
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        grammar=grammar,
        caller=caller,
    )


class _Free:
    error = None

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> bool:
        return False


def test_what_is_prepared_comes_with_its_outcome_and_what_was_cancelled_is_dropped() -> None:
    done: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
    gate = threading.Event()
    compiled: list[str] = []

    def start(grammar: str) -> Constraint:
        gate.wait(10)
        compiled.append(grammar)
        if grammar == "bad":
            raise ValueError("the grammar cannot be used: bad")
        if grammar == "broken":
            raise ZeroDivisionError("secret")
        return _Free()

    preparation = Preparation(start, done.put)
    names = {"a": "good", "b": "bad", "c": "broken", "gone": "good"}
    for name, grammar in names.items():
        preparation.begin(spec(name, grammar))
    assert done.empty()
    assert preparation.cancel("gone")
    assert not preparation.cancel("gone")
    assert not preparation.cancel("never was")
    gate.set()
    found = {prepared.request.request_id: prepared for prepared in (done.get(timeout=10) for _ in range(3))}
    assert isinstance(found["a"].outcome, _Free)
    assert found["b"].outcome == Failed(request_id="b", kind="grammar", message="the grammar cannot be used: bad")
    assert found["c"].outcome == Failed(request_id="c", kind="internal", message="the request could not be taken")
    assert {name: preparation.finish(prepared) for name, prepared in found.items()} == {
        "a": True,
        "b": True,
        "c": True,
    }
    preparation.close()
    assert done.empty()
    assert sorted(compiled) == ["bad", "broken", "good"], "what was cancelled before its turn was compiled"


def test_callers_take_turns_each_with_one_grammar_at_a_time() -> None:
    done: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
    begun: queue.SimpleQueue[str] = queue.SimpleQueue()
    gates: dict[str, threading.Event] = {}

    def start(grammar: str) -> Constraint:
        begun.put(grammar)
        assert gates[grammar].wait(10)
        return _Free()

    preparation = Preparation(start, done.put)
    for name in ("alice1", "alice2", "alice3", "bob1", "carol1", "bob2"):
        gates[name] = threading.Event()
        preparation.begin(spec(name, name, caller=name[:-1]))
    assert {begun.get(timeout=10), begun.get(timeout=10)} == {"alice1", "bob1"}
    order = []
    for ends in ("alice1", "carol1", "bob1", "alice2", "bob2", "alice3"):
        gates[ends].set()
        assert done.get(timeout=10).request.request_id == ends
        if len(order) < 4:
            order.append(begun.get(timeout=10))
    assert order == ["carol1", "alice2", "bob2", "alice3"]
    preparation.close()


def test_what_is_cancelled_while_it_compiles_is_dropped_when_it_is_done() -> None:
    done: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
    begun, gate = threading.Event(), threading.Event()

    def start(grammar: str) -> Constraint:
        begun.set()
        gate.wait(10)
        return _Free()

    preparation = Preparation(start, done.put)
    preparation.begin(spec("gone"))
    assert begun.wait(10)
    assert preparation.cancel("gone")
    gate.set()
    assert not preparation.finish(done.get(timeout=10))
    preparation.close()


def test_an_engine_without_a_tokenizer_file_refuses_grammars() -> None:
    done: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
    preparation = Preparation(None, done.put)
    preparation.begin(spec("a"))
    outcome = done.get(timeout=10).outcome
    assert isinstance(outcome, Failed)
    assert "without a tokenizer file" in outcome.message
    preparation.close()


def test_a_grammar_is_compiled_once_and_each_answer_has_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(str(TOKENIZER), 4096, [1])
    compiled: list[str] = []

    class Counting:
        def __new__(cls, tokenizer: object, grammar: str, **how: object) -> LLMatcher:  # type: ignore[misc]
            compiled.append(grammar)
            return LLMatcher(tokenizer, grammar, **how)  # type: ignore[arg-type]

    monkeypatch.setattr("longreach.engine.sampling.grammar.LLMatcher", Counting)
    text = LLMatcher.grammar_from_regex("[0-9]{2}")
    one, two = grammars.start(text), grammars.start(text)
    first = one.mask()
    assert first is not None
    token = next(i for i in range(4096) if first[i // 8] >> i % 8 & 1)
    one.accept(token)
    one.accept(token)
    assert (two.mask() == first).all()
    assert len(compiled) == 1
    for number in range(_KEPT):
        grammars.start(LLMatcher.grammar_from_regex(f"x{number}"))
    grammars.start(text)
    assert compiled.count(text) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="the grammar cannot be used"):
            grammars.start("no grammar")
    assert compiled.count("no grammar") == 1, "what is refused is remembered, too"


def test_requests_that_share_a_grammar_compile_it_once_although_they_come_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = Grammars(str(TOKENIZER), 4096, [1])
    compiled: list[str] = []
    gate = threading.Event()

    class Slow:
        def __new__(cls, tokenizer: object, grammar: str, **how: object) -> LLMatcher:  # type: ignore[misc]
            compiled.append(grammar)
            gate.wait(10)
            return LLMatcher(tokenizer, grammar, **how)  # type: ignore[arg-type]

    monkeypatch.setattr("longreach.engine.sampling.grammar.LLMatcher", Slow)
    text = LLMatcher.grammar_from_regex("[0-9]{2}")
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(grammars.start, text) for _ in range(2)]
        gate.set()
        first, second = (constraint.result(10).mask() for constraint in found)
    assert first is not None
    assert second is not None
    assert (first == second).all()
    assert compiled == [text]


def test_a_grammar_that_allows_no_text_says_so() -> None:
    empty = Grammars(str(TOKENIZER), 4096, [1]).start(LLMatcher.grammar_from_regex(r"[^\s\S]"))
    assert empty.mask() is None
    assert empty.error == "the grammar cannot be followed any further: there is no text that it allows"


class _Steps:
    """An engine that notes what it is told."""

    has_work = False

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def submit(self, request: Generate, constraint: Constraint | None = None) -> None:
        self.told.put(("submit", request.request_id))
        assert (constraint is None) == (request.grammar is None)

    def cancel(self, request_id: str) -> None:
        self.told.put(("cancel", request_id))


def test_a_grammar_that_compiles_for_long_holds_nobody_up() -> None:
    gates = {"slow": threading.Event(), "gone": threading.Event(), "bad": threading.Event()}

    def start(grammar: str) -> Constraint:
        gates[grammar].wait(10)
        if grammar == "bad":
            raise ValueError("the grammar cannot be used")
        return _Free()

    engine, inbox, outbox = _Steps(), queue.SimpleQueue(), queue.SimpleQueue()
    preparation = Preparation(start, inbox.put)
    serving = threading.Thread(target=process._serve, args=(engine, preparation, inbox, outbox))
    serving.start()
    for name in ("slow", "gone"):
        inbox.put(spec(name, name, caller=name))
    inbox.put(spec("plain", None))
    inbox.put(Cancel("gone"))
    inbox.put(Cancel("plain"))
    assert [engine.told.get(timeout=10) for _ in range(2)] == [("submit", "plain"), ("cancel", "plain")]
    for name in ("gone", "slow"):
        gates[name].set()
    assert engine.told.get(timeout=10) == ("submit", "slow")
    inbox.put(spec("bad", "bad"))
    gates["bad"].set()
    assert outbox.get(timeout=10) == Failed(request_id="bad", kind="grammar", message="the grammar cannot be used")
    inbox.put(None)
    serving.join(10)
    assert engine.told.empty()
    preparation.close()


def test_grammars_in_the_engine_process() -> None:
    async def scenario() -> None:
        config = EngineConfig(model=str(EMBEDDED_MODEL), device="cpu", tokenizer_file=str(TOKENIZER))
        client = await EngineClient.start(config)

        async def run(request: Generate) -> int:
            return sum([len(update.tokens) async for update in admitted(client, request)])

        try:
            quick = LLMatcher.grammar_from_regex("[0-9]{4}")
            found = await asyncio.gather(*(run(spec(f"r{i}", quick if i % 2 else None, 4)) for i in range(4)))
            assert found[0] == found[2] == 4
            assert found[1] == found[3] > 0
            leaving = admitted(client, spec("leaves", quick))
            first = asyncio.create_task(anext(leaving))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await leaving.aclose()
            with pytest.raises(RequestFailedError, match="the grammar cannot be used") as refused:
                await run(spec("none", "no grammar"))
            assert refused.value.kind == "grammar"
            assert client.requests_in_flight == 0
        finally:
            await client.stop()

    asyncio.run(scenario())
