"""Tables of results: what was measured stands in its cell, and what was not leaves it empty."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.documented import script


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return script("benchmarks", "report")


def row(task: str, choice: str, right: int, **kept: float) -> dict:
    return {"tokens": 4096, "task": task, "choice": choice, "prompts": 20, "right": right, **kept}


def test_answers_stand_by_choice_and_task_with_the_means_of_what_was_kept(report: ModuleType) -> None:
    rows = [
        row("count", "dense", 19),
        row("chain", "dense", 18),
        row("count", "pooled", 11, density=0.2, kept_mean=0.9),
        row("chain", "pooled", 12, density=0.4, kept_mean=0.8),
        {**row("chain", "dense", 1), "tokens": 1024},
    ]
    where = {"weights": "abc", "device": "a card", "torch": "2", "date": "2026-11-24"}
    lines = report.table({**where, "rows": rows}).splitlines()
    assert lines[0] == "| task | dense | pooled |"
    assert lines[2:7] == [
        "| count | 19 | 11 |",
        "| chain | 18 | 12 |",
        "| all 40 | 37 | 23 |",
        "| density |  | 0.300 |",
        "| mass kept |  | 0.850 |",
    ]
    about = "20 prompts of 4,096 tokens a task; the embedded model, weights abc; a card; torch 2; 2026-11-24."
    assert lines[-1] == about
