"""The default parameters of policies are those that the committed results pick."""

from __future__ import annotations

import json
from typing import Any

import pytest
from longreach.policies import BY_NAME

from tests.documented import ROOT, script

RESULTS = ROOT / "benchmarks" / "results"
quality_report = script("benchmarks", "quality_report")
answers_report = script("benchmarks", "answers_report")


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def picked(policy: str) -> dict[str, int]:
    """The parameters of the setting that both lengths together speak for, as `window size 8192` names them."""
    curves = [row for name in ("quality-16k-h100", "quality-32k-h100") for row in result(name)["curves"]]
    words = quality_report.picks({"curves": curves})[policy].split()
    assert words[0] == policy
    return {name: int(value) for name, value in zip(words[1::2], words[2::2], strict=True)}


@pytest.mark.parametrize("policy", ["window", "a_shape", "strided", "local_global", "bigbird"])
def test_a_pattern_begins_with_the_parameters_that_the_curves_pick(policy: str) -> None:
    parameters = dict(BY_NAME[policy].model_validate({"policy": policy}).resolve().parameters)
    found = picked(policy)
    assert found
    assert found.items() <= parameters.items()


def test_dynamic_begins_with_the_target_that_the_answers_pick() -> None:
    parameters = dict(BY_NAME["dynamic"].model_validate({"policy": "dynamic"}).resolve().parameters)
    recall, estimator = parameters["recall"], parameters["estimator"]
    assert estimator == "auto"  # which in the embedded model is moments
    assert answers_report.pick(result("dynamic-targets-h100")) == f"Moments(block=64), Recall(share={recall})"


def row(choice: str, task: str, right: int, density: float | None = None) -> dict[str, Any]:
    found = {"tokens": 64, "task": task, "choice": choice, "prompts": 100, "right": right, "kept_mean": 0.5}
    return found if density is None else found | {"density": density}


def answers(*choices: tuple[str, int, int, float]) -> dict[str, Any]:
    rows = [row("dense", "a", 100), row("dense", "b", 80)]
    for choice, a, b, density in choices:
        rows += [row(choice, "a", a, density), row(choice, "b", b, density)]
    return {"rows": rows, "weights": "abc", "device": "a card", "torch": "2", "date": "2026-11-25"}


def test_every_task_has_to_keep_its_answers() -> None:
    some = (("X(1), Y(1)", 100, 75, 0.1), ("X(1), Y(2)", 96, 77, 0.3), ("X(1), Y(3)", 100, 80, 0.9))
    assert answers_report.pick(answers(*some)) == "X(1), Y(2)"
    assert answers_report.pick(answers(some[0], ("X(1), Y(4)", 94, 80, 0.2))) is None
    assert answers_report.pick(answers(some[1])) is None  # nothing to choose from


def test_a_choice_that_was_not_asked_every_task_is_not_picked_and_leaves_cells_empty() -> None:
    some = answers(("X(1), Y(1)", 100, 80, 0.5), ("X(1), Y(2)", 100, 80, 0.4), ("X(1), Y(3)", 100, 80, 0.1))
    del some["rows"][-1]
    assert answers_report.pick(some) == "X(1), Y(2)"
    lines = answers_report.table(some).splitlines()
    assert lines[0] == "| choice | a | b | all 200 | density | mass kept |"
    assert lines[2:6] == [
        "| dense | 100 | 80 | 180 |  | 0.500 |",
        "| X(1), Y(1) | 100 | 80 | 180 | 0.500 | 0.500 |",
        "| **X(1), Y(2)** | 100 | 80 | 180 | 0.400 | 0.500 |",
        "| X(1), Y(3) | 100 |  |  |  |  |",
    ]
