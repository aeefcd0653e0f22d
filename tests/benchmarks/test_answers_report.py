"""Answers by choice of tiles: what was measured stands in its cell, what was not leaves it empty, and one is picked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import answers_report, report

Answers = tuple[str, int, int, float]  # choice, right ones of each task, density


def row(task: str, choice: str, right: int, **kept: float) -> dict[str, Any]:
    return {"tokens": 4096, "task": task, "choice": choice, "prompts": 100, "right": right, **kept}


def result(*choices: Answers) -> dict[str, Any]:
    rows = [row("chain", "dense", 100), row("count", "dense", 80), {**row("chain", "dense", 1), "tokens": 1024}]
    for choice, chains, counts, density in choices:
        rows += [row("chain", choice, chains, density=density, kept_mean=0.9)]
        rows += [row("count", choice, counts, density=density + 0.2, kept_mean=0.8)]
    return {"rows": rows, "weights": "abc", "device": "a card", "torch": "2", "date": "2026-11-25"}


def test_answers_stand_by_choice_and_task_with_the_means_of_what_was_kept() -> None:
    lines = report.table(result(("pooled", 99, 71, 0.2))).splitlines()
    assert lines[0] == "| task | dense | pooled |"
    assert lines[2:7] == [
        "| chain | 100 | 99 |",
        "| count | 80 | 71 |",
        "| all 200 | 180 | 170 |",
        "| density |  | 0.300 |",
        "| mass kept |  | 0.850 |",
    ]
    about = "100 prompts of 4,096 tokens a task; the embedded model, weights abc; a card; torch 2; 2026-11-25."
    assert lines[-1] == about


def test_every_task_has_to_keep_its_answers() -> None:
    loses_counts, keeps, keeps_all = (
        ("X(1), Y(1)", 100, 75, 0.1),
        ("X(1), Y(2)", 99, 79, 0.3),
        ("X(1), Y(3)", 100, 80, 0.7),
    )
    assert answers_report.pick(result(loses_counts, keeps, keeps_all)) == "X(1), Y(2)"
    loses_chains = ("X(1), Y(4)", 98, 80, 0.2)
    assert answers_report.pick(result(loses_counts, loses_chains, ("X(1), Y(5)", 90, 70, 0.1))) is None
    assert answers_report.pick(result(keeps, keeps_all)) is None  # too few to choose from


def test_only_what_is_on_a_curve_is_picked() -> None:
    curve = [(f"X(1), Y({i})", 100, 80, 0.5 + i / 10) for i in range(3)]
    assert answers_report.pick(result(("Z(1), Y(1)", 100, 80, 0.1), *curve)) == "X(1), Y(0)"


def test_a_choice_that_was_not_asked_every_task_is_not_picked_and_leaves_cells_empty() -> None:
    some = result(("X(1), Y(1)", 100, 80, 0.5), ("X(1), Y(2)", 100, 80, 0.4), ("X(1), Y(3)", 100, 80, 0.1))
    del some["rows"][-1]
    assert answers_report.pick(some) == "X(1), Y(2)"
    lines = report.table(some).splitlines()
    assert lines[0] == "| choice | chain | count | all 200 | density | mass kept |"
    assert lines[2:6] == [
        "| dense | 100 | 80 | 180 |  |  |",
        "| X(1), Y(1) | 100 | 80 | 180 | 0.600 | 0.850 |",
        "| **X(1), Y(2)** | 100 | 80 | 180 | 0.500 | 0.850 |",
        "| X(1), Y(3) | 100 |  |  |  |  |",
    ]


def test_what_makes_a_curve_is_drawn(tmp_path: Path) -> None:
    some = [("X(1), Y(1)", 100, 75, 0.1), ("X(1), Y(2)", 96, 77, 0.3), ("X(1), Y(3)", 100, 80, 0.7)]
    assert report.picture_of(result(*some[:2])) is None
    draw = report.picture_of(result(*some))
    assert draw is not None
    assert draw is answers_report.draw
    draw(result(*some), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
