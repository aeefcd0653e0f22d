"""A next turn and a second question read what is new, for models of every kind of layers; the answers are the plain."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from longreach.engine.engine import Engine
from longreach.engine.messages import Failed, Generate, Sampling
from longreach.engine.requests.step_plan import StepPlan

from tests.server.engine.kinds import KINDS, PAGE, Counting, engine_of, most_read_again
from tests.server.engine.simulation import SimulatedRunner, expected_stream

VOCABULARY = 50


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def ask(engine: Engine, prompt: list[int], max_tokens: int, speculate: int = 0) -> tuple[list[int], int, Generate]:
    """The answer to a prompt, how many of the prompt's tokens were cached, and the request."""
    sampling = Sampling(seed=3)
    spec = Generate(request_id="r", prompt=prompt, max_tokens=max_tokens, sampling=sampling, speculate=speculate)
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


class Drawing(Counting):
    """Draws one token most often, so that some drafts stand."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def launch(self, plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        launched = super().launch(plan)
        return lambda: {name: [self._draw() for _ in tokens] for name, tokens in launched().items()}

    def _draw(self) -> int:
        return self._rng.choice((7, 7, 7, 7, 7, 7, 7, 8))


@pytest.mark.parametrize(("kind", "page", "speculate"), [("states", PAGE, 0), ("states", 16, 4), ("mixed", PAGE, 4)])
def test_next_turns_of_all_lengths_read_what_is_new(kind: str, page: int, speculate: int) -> None:
    rng = random.Random(7)
    for number in range(5):
        engine = engine_of(kind, Drawing(number), pages=20 * PAGE, page=page)
        said, answered = rng.choice((200, 400, 600)), rng.choice((20, 60, 250 if speculate else 100))
        talk, known = [], 0
        for turn in range(10):
            talk = talk + text(rng.randint(1, said), 100 * number + turn)
            answer, cached, _ = ask(engine, talk, rng.randint(1, answered), speculate)
            assert known - cached <= most_read_again(kind), f"turn {turn} has read {known - cached} tokens again"
            talk = talk + answer
            known = len(talk) - 1


@pytest.mark.parametrize("kind", ["states", "mixed"])
@pytest.mark.parametrize("answered", [5, 60, 300])
def test_turns_of_any_length_compute_what_is_new_with_few_copies(kind: str, answered: int) -> None:
    """Also the first next turn of a conversation, however short its first prompt is and its answer."""
    rng = random.Random(11)
    for first in (100, 256, 383, 500, 900, 1151, 2000):
        runner = Counting()
        engine, talk = engine_of(kind, runner, slots=6), []
        for turn in range(10):
            new = text(first if turn == 0 else rng.randint(100, 2000), 100 * first + turn)
            before = runner.computed
            answer, _, _ = ask(engine, talk + new, answered)
            again = runner.computed - before - len(new) - len(answer)
            assert again <= (most_read_again(kind) if turn else 0), f"turn {turn} has read {again} tokens again"
            talk = talk + new + answer


def test_the_copy_of_a_short_prompt_gives_way_once_its_answer_has_one() -> None:
    engine, document = engine_of("states", Counting(), slots=6), text(5000, 1)
    ask(engine, document, 1)
    chats = [text(500, 2 + chat) for chat in range(3)]
    answers = [ask(engine, chat, 200)[0] for chat in chats]
    cached = [ask(engine, chat + answer + text(5, 9), 1)[1] for chat, answer in zip(chats, answers, strict=True)]
    assert cached == [640] * 3
    assert ask(engine, document, 1)[1] == 4864, "which was read before all of them"


@pytest.mark.parametrize("speculate", [0, 4])
def test_an_answer_that_fills_a_page_leaves_a_copy_at_its_end(speculate: int) -> None:
    engine, prompt = engine_of("states", Counting()), text(100, 1)
    answer, _, _ = ask(engine, prompt, PAGE + 1 - 100, speculate)
    _, cached, _ = ask(engine, prompt + answer + text(5, 2), 1)
    assert cached == PAGE


@pytest.mark.parametrize("kind", ["states", "mixed"])
def test_short_questions_with_one_beginning_take_one_step_each_in_the_end(kind: str) -> None:
    runner, beginning = Counting(), text(512, 1)
    engine = engine_of(kind, runner)
    cached, steps = 0, []
    for question in range(12):
        before = runner.steps
        _, cached, _ = ask(engine, beginning + text(500, 2 + question), 1)
        steps.append(runner.steps - before)
    assert cached == 512
    assert steps[0] == 2, "it may be a conversation"
    assert steps[-1] == 1, "many have begun like it"
    assert max(steps) <= 3


@pytest.mark.parametrize("kind", ["states", "mixed"])
def test_a_copy_near_the_one_that_a_turn_starts_from_is_worth_no_step(kind: str) -> None:
    runner = Counting()
    engine, talk = engine_of(kind, runner), text(3000, 1)
    extra = 0
    for turn in range(12):
        before = runner.steps
        answer, _, _ = ask(engine, talk, 10)
        extra += runner.steps - before - 10
        talk = talk + answer + text(30, 2 + turn)
    assert extra <= 1 + 12 * 40 // 256


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_question_finds_the_document_cached(kind: str) -> None:
    engine, document = engine_of(kind, Counting()), text(65536, 1)
    ask(engine, document + text(60, 2), 20)
    for question, length in ((3, 20), (4, 120)):
        prompt = document + text(length, question)
        _, cached, _ = ask(engine, prompt, 20)
        assert cached >= 0.99 * len(prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_document_is_read_once(kind: str) -> None:
    engine, document = engine_of(kind, Counting()), text(900, 1)
    for question in range(3):
        _, cached, _ = ask(engine, document + text(30 + 10 * question, 2 + question), 20)
        assert cached >= 900 - most_read_again(kind) or not question


class Watched(list[int]):
    """Tokens that know how many of them were copied."""

    copied = 0

    def __getitem__(self, place):  # type: ignore[override]
        found = super().__getitem__(place)
        self.copied += len(found) if isinstance(place, slice) else 0
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_an_answer_copies_no_prompt(kind: str) -> None:
    runner = SimulatedRunner(PAGE, VOCABULARY, overlaps=True, windows=KINDS[kind][0], states=KINDS[kind][1])
    engine = engine_of(kind, runner)
    spec = Generate(request_id="r", prompt=text(20 * PAGE, 1), max_tokens=PAGE, sampling=Sampling(seed=3))
    assert engine.submit(spec) is None
    for _ in range(4):
        engine.step()
    [request] = engine.scheduler.running.values()
    request.tokens = watched = Watched(request.tokens)
    for _ in range(PAGE // 2):
        engine.step()
    assert request.tokens is watched
    assert watched.copied < 2 * PAGE
