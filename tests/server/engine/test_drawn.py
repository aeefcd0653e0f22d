"""Answers that another engine has begun: they go on as if nothing had happened, and nothing is told again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from longreach.engine.messages import Generate, Sampling

from tests.server.engine.conftest import ids
from tests.server.engine.driving import build, drain, spec
from tests.server.engine.test_engine import Countdown

PROMPT = ids(70, seed=1)
LENGTH = 24
# Ways to draw that depend on what was drawn before, or on how much.
WAYS = {
    "greedy": Sampling(temperature=0),
    "seeded": Sampling(temperature=1.5, seed=7),
    "penalties": Sampling(temperature=0, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5),
    "bad words": Sampling(temperature=1.0, seed=7, bad_words=[[3, 4], [9]]),
}


def asked(name: str, way: str, speculate: int, drawn: list[int]) -> Generate:
    whole = spec(name, PROMPT, max_tokens=LENGTH, min_tokens=20, stop_token_ids=[5], logprobs=1, speculate=speculate)
    return msgspec.structs.replace(whole, sampling=WAYS[way], drawn=drawn)


@pytest.mark.parametrize("speculate", [0, 3])
def test_an_answer_goes_on_behind_what_was_drawn(model_dir: Path, speculate: int) -> None:
    first, second = build(model_dir)[0], build(model_dir, max_num_seqs=16)[0]
    for way in WAYS:
        assert first.submit(asked(way, way, speculate, [])) is None
    plain, _, failures = drain(first)
    assert not failures
    assert min(map(len, plain.values())) > 20
    assert len({*map(tuple, plain.values())}) == len(WAYS)
    for drawn in (1, 11, 20):
        for way in WAYS:
            assert second.submit(asked(f"{way}-{drawn}", way, speculate, plain[way][:drawn])) is None
    rest, updates, failures = drain(second)
    assert not failures
    for name, tokens in rest.items():
        way, drawn = name.rsplit("-", 1)
        assert plain[way][: int(drawn)] + tokens == plain[way], name
        last = updates[name][-1]
        assert (last.prompt_tokens, last.computed) == (len(PROMPT), len(PROMPT))
        assert sum(len(update.logprobs) for update in updates[name]) == len(tokens)


def test_a_grammar_is_led_through_what_was_drawn(model_dir: Path) -> None:
    engine, _ = build(model_dir)
    whole = spec("whole", PROMPT, 1.0, grammar="even")
    assert engine.submit(whole, Countdown(5)) is None
    plain = drain(engine)[0]["whole"]
    rest = msgspec.structs.replace(whole, request_id="rest", drawn=plain[:3])
    assert engine.submit(rest, Countdown(5)) is None
    assert drain(engine)[0]["rest"] == plain[3:]
    broken = Countdown(5)
    broken.error = "too complex"
    failed = engine.submit(msgspec.structs.replace(rest, request_id="broken"), broken)
    assert failed is not None
    assert (failed.kind, failed.message) == ("grammar", "too complex")


def test_what_is_drawn_to_its_end_is_refused(model_dir: Path) -> None:
    failed = build(model_dir)[0].submit(spec("over", PROMPT, max_tokens=3, drawn=[7, 8, 9]))
    assert failed is not None
    assert failed.kind == "invalid"
