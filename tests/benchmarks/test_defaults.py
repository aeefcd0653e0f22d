"""The default parameters of policies are those that the committed results pick."""

from __future__ import annotations

import json
from typing import Any

import pytest
from longreach.policies.schemas import BY_NAME
from longreach.policies.values import Dynamic

from benchmarks import answers_report, quality_report
from tests.documented import ROOT

RESULTS = ROOT / "benchmarks" / "results"


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
    parameters = BY_NAME[policy].model_validate({"policy": policy}).model_dump()
    found = picked(policy)
    assert found
    assert found.items() <= parameters.items()


def test_dynamic_begins_with_the_target_that_the_answers_pick() -> None:
    parameters = Dynamic().parameters
    recall, estimator = parameters["recall"], parameters["estimator"]
    assert estimator == "auto"  # which in the embedded model is moments
    assert answers_report.pick(result("dynamic-thousand-h100")) == f"Moments(block=64), Recall(share={recall})"
