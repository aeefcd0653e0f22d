"""A next turn and a second question read what is new, for models of every kind of layers; the answers are the plain."""

from __future__ import annotations

import random

import pytest
from longreach.engine.engine import Engine
from longreach.engine.messages import Failed, Generate, Sampling

from tests.server.engine.kinds import KINDS, PAGE, Counting, engine_of, most_read_again
from tests.server.engine.simulation import SimulatedRunner, expected_stream

VOCABULARY = 50


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def ask(engine: Engine, prompt: list[int], max_tokens: int) -> tuple[list[int], int, Generate]:
    """The answer to a prompt, how many of the prompt's tokens were cached, and the request."""
    spec = Generate(request_id="r", prompt=prompt, max_tokens=max_tokens, sampling=Sampling(seed=3))
    assert engine.submit(spec) is None
    tokens: list[int] = []
    cached = 0
    while engine.has_work:
        for news in engine.step():
            assert not isinstance(news, Failed)
            for update in news.updates:
                tokens += update.tokens
                cached = update.cached
    engine.scheduler.check()
    return tokens, cached, spec


@pytest.mark.parametrize(
    ("said", "answered"), [(20, 20), (2000, 100), (20, 500)], ids=["short turns", "long turns", "long answers"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_of_ten_turns_reads_what_is_new(kind: str, said: int, answered: int) -> None:
    windows, states = KINDS[kind]
    runner = SimulatedRunner(PAGE, VOCABULARY, overlaps=True, windows=windows, states=states)
    engine = engine_of(kind, runner)
    talk, known = [], 0
    answer, spec = [], None
    for turn in range(10):
        talk = talk + answer + text(said, turn)
        before = runner.computed_tokens
        answer, cached, spec = ask(engine, talk, answered)
        again = known - cached
        assert again <= most_read_again(kind), f"turn {turn} has read {again} tokens again"
        # One token behind the answer, which was being computed when it ended.
        assert runner.computed_tokens - before <= len(talk) - cached + answered
        known = len(talk) + answered - 1
    assert spec is not None
    alone = {"none": windows, "alone": (None,), "beside": (*windows, None)}[states]
    assert answer == expected_stream(spec, 3, VOCABULARY, windows=alone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_question_finds_the_document_cached(kind: str) -> None:
    engine, document = engine_of(kind, Counting()), text(65536, 1)
    ask(engine, document + text(60, 2), 20)
    for question, length in ((3, 20), (4, 120)):
        prompt = document + text(length, question)
        _, cached, _ = ask(engine, prompt, 20)
        assert cached >= 0.99 * len(prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_document_is_read_twice_at_most(kind: str) -> None:
    """The second question leaves a copy of the state where it parts from the first, however short the document is."""
    engine, document = engine_of(kind, Counting()), text(900, 1)
    ask(engine, document + text(30, 2), 20)
    ask(engine, document + text(40, 3), 20)
    _, cached, _ = ask(engine, document + text(50, 4), 20)
    assert cached == 900 // PAGE * PAGE
