"""Log-probabilities of prompts and answers: those of the model, however a step came about, each told once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from longreach.engine.engine import Engine
from longreach.engine.messages import Sampling
from longreach.engine.requests.prompt_lookup import MAX_DRAFTS
from longreach.engine.updates import Logprob, Update
from transformers import AutoModelForCausalLM

from tests.server.engine.conftest import ids
from tests.server.engine.driving import build, drain, spec


def scores(updates: list[Update]) -> tuple[list[Logprob], list[Logprob]]:
    """The log-probabilities of the prompt and of the answer."""
    return [s for u in updates for s in u.prompt_logprobs], [s for u in updates for s in u.logprobs]


@pytest.mark.parametrize("speculate", [0, 5])
def test_logprobs_are_those_of_the_model_however_they_are_computed(model_dir: Path, speculate: int) -> None:
    prompt = ids(25, seed=3) * 3
    engine, _ = build(model_dir)
    engine.submit(spec("before", prompt))  # its pages are in the cache, and must not be taken over unscored
    drain(engine)
    for name in ("a", "b"):
        engine.submit(spec(name, prompt, 1.0, max_tokens=20, logprobs=3, prompt_logprobs=2, speculate=speculate))
    engine.submit(spec("unscored", ids(50, seed=9), 1.0))
    tokens, updates, failures = drain(engine)
    assert not failures
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    whole = prompt + tokens["a"]
    with torch.no_grad():
        expected = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    for name in ("a", "b"):
        of_prompt, of_answer = scores(updates[name])
        assert [s.token for s in of_prompt] == prompt[1:]
        assert [s.token for s in of_answer] == tokens["a"]
        for position, score in enumerate(of_prompt + of_answer, start=1):
            row = expected[position - 1]
            count = 2 if position < len(prompt) else 3
            assert score.logprob == pytest.approx(row[whole[position]].item(), abs=1e-3)
            assert score.top_logprobs == pytest.approx(row.topk(count).values.tolist(), abs=1e-3)
            assert len(score.top_tokens) == count
    assert scores(updates["unscored"]) == ([], [])
    assert updates["a"][-1].cached < len(prompt) // 16 * 16


def test_prompt_logprobs_never_need_more_rows_than_a_step_has_room_for(model_dir: Path) -> None:
    engine, _ = build(model_dir, max_batched_tokens=200)
    sizes = []
    launch = engine._runner.launch
    engine._runner.launch = lambda plan: sizes.append(sum(c.num_rows for c in plan.chunks)) or launch(plan)  # type: ignore[method-assign]
    engine.submit(spec("long", ids(220, seed=3), prompt_logprobs=0, max_tokens=2))
    engine.submit(spec("other", ids(220, seed=4), prompt_logprobs=0, max_tokens=2))
    _, updates, _ = drain(engine)
    assert max(sizes) <= MAX_DRAFTS + 2
    assert len(scores(updates["long"])[0]) == len(scores(updates["other"])[0]) == 219


def test_a_preempted_request_tells_each_logprob_once(model_dir: Path) -> None:
    engine, _ = build(model_dir, kv_cache_bytes=16 * 16 * 512, prefix_cache=True)
    engine.scheduler.limits = dataclasses.replace(engine.scheduler.limits, promised_tokens=1)
    prompts = {f"r{n}": ids(n, seed=n) for n in (40, 50, 60)}
    for name, prompt in prompts.items():
        engine.submit(spec(name, prompt, 1.0, max_tokens=100, logprobs=0, prompt_logprobs=0))
    requests = [*engine.scheduler.waiting.values()]
    tokens, updates, failures = drain(engine)
    assert not failures
    assert any(request.preempted for request in requests)
    for name, prompt in prompts.items():
        of_prompt, of_answer = scores(updates[name])
        assert ([s.token for s in of_prompt], [s.token for s in of_answer]) == (prompt[1:], tokens[name])


def test_penalties_and_logprobs_are_the_same_one_step_ahead(model_dir: Path) -> None:
    """What depends on the tokens before waits for them, and what is told of a step is told with it."""
    how = Sampling(temperature=0.0, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.5)
    told = []
    for overlaps in (False, True):
        engine, _ = build(model_dir)
        engine._runner.overlaps = overlaps
        one = spec("penalized", ids(40, seed=1), max_tokens=30, logprobs=1, prompt_logprobs=0)
        engine.submit(msgspec.structs.replace(one, sampling=how))
        engine.submit(spec("scored", ids(60, seed=2), 1.0, max_tokens=30, logprobs=0, prompt_logprobs=1))
        tokens, updates, failures = drain(engine)
        assert not failures
        of_prompt, of_answer = scores(updates["scored"])
        assert ([s.token for s in of_prompt], [s.token for s in of_answer]) == (ids(60, seed=2)[1:], tokens["scored"])
        told.append(tokens)
    assert told[0] == told[1]
    engine.submit(spec("penalized", ids(40, seed=1), max_tokens=30))
    assert drain(engine)[0]["penalized"] != told[0]["penalized"], "penalties change nothing"


def change_logits(engine: Engine, change: Callable[[torch.Tensor], None]) -> None:
    """Have `change` alter the logits of every step in place."""
    computing = engine._runner._computing  # type: ignore[attr-defined]
    plain = computing.logits

    def logits(*args: object) -> object:
        found, samples = plain(*args)
        change(found)
        return found, samples

    computing.logits = logits


def test_no_logprob_is_below_the_least_that_json_can_tell(model_dir: Path) -> None:
    engine, started = build(model_dir)

    def leave_two(logits: torch.Tensor) -> None:
        logits[:, 2:] = float("-inf")
        logits[:, 0], logits[:, 1] = 30_000.0, 0.0

    change_logits(engine, leave_two)
    engine.submit(spec("a", [0, 1, 7], max_tokens=1, logprobs=4, prompt_logprobs=2))
    _, updates, _ = drain(engine)
    of_prompt, of_answer = scores(updates["a"])
    assert [score.logprob for score in of_prompt] == [-9999.0, -9999.0]
    assert [score.top_logprobs for score in of_prompt] == [[0.0, -9999.0]] * 2
    assert of_answer == [Logprob(0, 0.0, [0, 1, 2, 3], [0.0, -9999.0, -9999.0, -9999.0])]
    assert started.vocab_size > 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_prompt_without_logprobs_fails_alone(model_dir: Path, bad: float) -> None:
    """The row that a token is drawn from may be sound where another row of the prompt is not."""
    engine, _ = build(model_dir)
    prompts = {name: ids(20, seed=n) for n, name in enumerate(("scored", "plain", "other"))}

    def spoil(logits: torch.Tensor) -> None:
        if len(logits) > 20:  # the prompts' own step: the 19 rows that "scored" is scored from are its first
            logits[len(logits) - 10, 3] = bad

    engine.submit(spec("other", prompts["other"], prompt_logprobs=0))
    expected = drain(engine)[0]["other"]
    engine, _ = build(model_dir, max_batched_tokens=64)
    change_logits(engine, spoil)
    engine.submit(spec("plain", prompts["plain"]))
    engine.submit(spec("scored", prompts["scored"], prompt_logprobs=0))
    engine.submit(spec("other", prompts["other"]))
    tokens, _, failures = drain(engine)
    assert [(one.request_id, one.kind) for one in failures] == [("scored", "internal")]
    assert "not a number" in failures[0].message
    assert tokens["other"] == expected
    assert engine.scheduler.allocator.num_available == engine.scheduler.allocator.num_pages
