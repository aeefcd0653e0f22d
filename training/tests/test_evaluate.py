"""One forward pass tells what greedy decoding would answer, and a window hides what lies beyond it."""

import dataclasses
from pathlib import Path

import pytest
import torch

from training import card, evaluate
from training.evaluate import Cell
from training.recall.samples import Sample
from training.recall.suite import Plan, sampler_of, samples

PLAN = Plan(tasks=("single", "chain"), lengths=(512,), depths=2, count=6, phrasing="held_out")


def test_a_forward_pass_agrees_with_greedy_decoding(model_directory: Path) -> None:
    codec, model = evaluate._codec(model_directory), evaluate.load(model_directory, torch.device("cpu"))
    drawn = [s for task in PLAN.tasks for s, _ in samples(sampler_of(codec, PLAN), PLAN, task, 512)]
    drawn.append(_with_another_answer(drawn[0]))
    found = [right for right, _ in evaluate.answered(model, codec, drawn)]
    for sample, right in zip(drawn, found, strict=True):
        question = sample.questions[0]
        target = sample.ids[question.start : question.end].tolist()
        prompt = torch.from_numpy(sample.ids[None, : question.start])
        said = model.generate(prompt, max_new_tokens=len(target))  # type: ignore[operator]
        assert (said[0, question.start :].tolist() == target) == right
    assert found[0]
    assert not found[-1]


def _with_another_answer(sample: Sample) -> Sample:
    """The sample, but what it takes for the right answer is wrong in its second token."""
    ids = sample.ids.copy()
    ids[sample.questions[0].start + 1] += 1
    return dataclasses.replace(sample, ids=ids)


def test_a_cell_is_a_row_of_the_benchmark(model_directory: Path) -> None:
    codec, model = evaluate._codec(model_directory), evaluate.load(model_directory, torch.device("cpu"))
    cell = Cell("plain", PLAN, "single", 512)
    drawn = evaluate._draw(model_directory, cell)
    row = evaluate.measure(model, codec, cell, drawn)
    assert (row["task"], row["length"], row["prompts"], list(row["by_depth"])) == ("single", 512, 6, ["0", "1"])
    right = sum(right for right, _ in evaluate.answered(model, codec, drawn))
    assert row["exact"] == pytest.approx(right / 6, abs=1e-4)


def test_a_window_changes_what_lies_beyond_it_and_nothing_else(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "WINDOW", 64)
    dense, windowed = (evaluate.load(model_directory, torch.device("cpu"), window=flag) for flag in (False, True))
    ids = torch.randint(5, 4096, (1, 160), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        one, two = (model.base_model(input_ids=ids, use_cache=False).last_hidden_state for model in (dense, windowed))
    torch.testing.assert_close(one[:, :60], two[:, :60], rtol=1e-4, atol=1e-4)
    assert (one[:, 80:] - two[:, 80:]).abs().amax() > 1e-2


def test_plans_cover_what_the_card_claims() -> None:
    assert {name: plan.count for name, plan in evaluate.PLANS.items()} == dict.fromkeys(evaluate.PLANS, 100)
    assert evaluate.PLANS["plain"] == dataclasses.replace(evaluate.PLANS["held_out"], phrasing="plain")
    assert max(evaluate.PLANS["long"].lengths) == 131072


def test_a_cell_that_is_low_on_other_prompts_is_named() -> None:
    rows = [{"task": "chain", "length": 1024, "exact": 0.91}, {"task": "count", "length": 1024, "exact": 0.99}]
    plan = {"seed": 3, "count": 50}
    assert card.other({"plan": plan, "rows": rows}).endswith("0.950 at 1,024 tokens; below 0.95: chain at 1,024 0.91.")
    assert card.other({"plan": plan, "rows": rows[1:]}).endswith("0.990 at 1,024 tokens; no cell below 0.95.")
