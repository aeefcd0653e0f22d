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
        row("chain", "moments", 17, density=0.5, kept_mean=0.95),
    ]
    where = {"weights": "abc", "device": "a card", "torch": "2", "date": "2026-11-24"}
    lines = report.table({**where, "rows": rows}).splitlines()
    assert lines[0] == "| tokens | choice | count | chain | density | mass kept |"
    assert lines[2:5] == [
        "| 4,096 | dense | 19 of 20 | 18 of 20 |  |  |",
        "| 4,096 | pooled | 11 of 20 | 12 of 20 | 0.300 | 0.850 |",
        "| 4,096 | moments |  | 17 of 20 | 0.500 | 0.950 |",
    ]
    assert lines[-1] == "the embedded model, weights abc; a card; torch 2; 2026-11-24."
