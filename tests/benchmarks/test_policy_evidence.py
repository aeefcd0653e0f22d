"""Answers of a shared GPU with times of runs that were alone, and what a page makes of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks import policy_evidence, report


def row(setting: str, tokens: int, seconds: float | None, right: list[bool], **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"density": None, "kept": None, "kept_min": None, "keys_read": None, "answer_kept": None}
    return told | {"setting": setting, "tokens": tokens, "tasks": {"single": right}, "ttft_s": seconds} | more


def result(seconds: float | None) -> dict[str, Any]:
    beside = {"lost": 1, "gained": 0, "p": 1.0, "ttft_of_dense": 9.0, "density": 0.25, "kept": 0.75, "kept_min": 0.5}
    return {
        "suite": "ruler-like",
        "environment": {"device": "a GPU", "versions": {"torch": "2"}, "date": "today"},
        "model": {"name": "http://127.0.0.1:8101"},
        "plan": {"count": 2},
        "unable": {"4096": [], "8192": []},
        "refused": {},
        "curves": [
            row("dense", 4096, seconds, [True, True]),
            row("window size 1024", 4096, seconds, [True, False], **beside),
            row("dense", 8192, seconds, [True, True]),
            row("window size 1024", 8192, seconds, [True, False], **beside),
        ],
    }


def test_times_are_those_of_the_run_that_was_alone() -> None:
    alone = result(0.5)
    alone["curves"] = alone["curves"][2:]
    alone["curves"][0]["ttft_s"] = 2.0
    joined = policy_evidence.with_times(result(7.0), alone)
    assert [r["ttft_s"] for r in joined["curves"]] == [None, None, 2.0, 0.5]
    assert [r["ttft_of_dense"] for r in joined["curves"]] == [None, None, None, 0.25]
    shown = report.table(joined)
    assert "| **window size 1024** | 1 of 2 at 0.25 | 1 of 2 at 0.25 | 2 / 0 (0.5) | 0.750, 0.500 | 0.25 |" in shown
    assert report.picture_of(joined) is not None


def test_times_of_another_machine_are_refused() -> None:
    other = copy.deepcopy(result(1.0))
    other["environment"]["device"] = "another GPU"
    with pytest.raises(ValueError, match="measure both on one kind of machine"):
        policy_evidence.with_times(result(1.0), other)
