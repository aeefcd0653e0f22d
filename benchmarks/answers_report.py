"""The result of `dynamic_model.py` as a Markdown table and a picture, and which choice of tiles it speaks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MOST_LOST = 0.01  # of the prompts of a task: a target keeps the rest of what dense attention answers, or is not picked

Cells = dict[str, dict[str, dict[str, Any]]]  # rows by choice and task


def _length(result: dict[str, Any]) -> int:
    return max(row["tokens"] for row in result["rows"])


def cells_of(result: dict[str, Any]) -> Cells:
    """The rows of the longest prompts."""
    cells: Cells = {}
    for row in result["rows"]:
        if row["tokens"] == _length(result):
            cells.setdefault(row["choice"], {})[row["task"]] = row
    return cells


def table(result: dict[str, Any]) -> str:
    """Right answers by task and choice, all tasks together, mean density and mean mass kept; the picked choice in bold.
    What was not asked is left empty. A row for each task, or for each choice where there are more of these."""
    cells = cells_of(result)
    dense = cells["dense"]
    prompts = sum(row["prompts"] for row in dense.values())
    picked = pick(result)
    lines = [["task", *(f"**{choice}**" if choice == picked else choice for choice in cells)]]
    lines += [[task, *(str(of[task]["right"]) if task in of else "" for of in cells.values())] for task in dense]
    whole = [of.values() if of.keys() == dense.keys() else () for of in cells.values()]
    totals = (str(sum(row["right"] for row in rows)) if rows else "" for rows in whole)
    lines.append([f"all {prompts:,}", *totals])
    for title, name in (("density", "density"), ("mass kept", "kept_mean")):
        shares = ([row[name] for row in rows if name in row] for rows in whole)
        lines.append([title, *(f"{sum(x) / len(x):.3f}" if x else "" for x in shares)])
    if len(cells) > len(dense):
        lines = [list(line) for line in zip(*lines, strict=True)]
        lines[0][0] = "choice"
    lines.insert(1, ["---", *["---:"] * (len(lines[0]) - 1)])
    about = f"{prompts // len(dense):,} prompts of {_length(result):,} tokens a task; the embedded model, weights "
    about += f"{result['weights']}; {result['device']}; torch {result['torch']}; {result['date']}."
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{about}\n"


def most_lost(cells: Cells, choice: str) -> float:
    """The share of the prompts that dense attention answers more, on the task that loses most."""
    return max((cells["dense"][task]["right"] - row["right"]) / row["prompts"] for task, row in cells[choice].items())


def density(cells: Cells, choice: str) -> float:
    """Of the layers that attend to everything, the mean over tasks."""
    rows = cells[choice].values()
    return sum(row["density"] for row in rows) / len(rows)


def pick(result: dict[str, Any]) -> str | None:
    """Where targets make curves, the choice on one that computes least of those that lose at most `MOST_LOST` on every
    task; None where they make none, or all lose more. What was not asked every task is left out."""
    cells = cells_of(result)
    asked = [choice for choice in on_curves(result) if cells[choice].keys() == cells["dense"].keys()]
    good = [choice for choice in asked if most_lost(cells, choice) <= MOST_LOST]
    return min(good, key=lambda choice: density(cells, choice), default=None)


def series(choice: str) -> str:
    """What a choice is drawn with: its estimator and its kind of target."""
    estimator, _, target = choice.partition("), ")
    return f"{estimator}), {target.split('(')[0]}"


def on_curves(result: dict[str, Any]) -> list[str]:
    """The choices of estimators that were asked with so many targets of one kind that they make a line."""
    found = [choice for choice in cells_of(result) if choice != "dense"]
    lines = [series(choice) for choice in found]
    return [choice for choice, line in zip(found, lines, strict=True) if lines.count(line) > 2]


def draw(result: dict[str, Any], path: Path) -> None:
    """What is not lost on the task that loses most, against density; the picked choice has a ring."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cells = cells_of(result)
    picked = pick(result)
    figure, axis = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    lines: dict[str, list[str]] = {}
    for choice in cells:
        if choice != "dense":
            lines.setdefault(series(choice), []).append(choice)
    for i, (name, choices) in enumerate(lines.items()):
        points = sorted((density(cells, choice), 1 - most_lost(cells, choice), choice) for choice in choices)
        axis.plot([p[0] for p in points], [p[1] for p in points], marker=".", color=f"C{i}", label=name)
        for x, y, choice in points:
            axis.annotate(
                choice.rsplit("=", 1)[-1].rstrip(")"),
                (x, y),
                xytext=(4, 5 if i % 2 else -11),
                textcoords="offset points",
                fontsize=7,
            )
            if choice == picked:
                axis.plot([x], [y], "o", mfc="none", ms=11, color=f"C{i}")
    axis.axhline(1 - MOST_LOST, color="gray", lw=0.8, ls=":")
    axis.set_xlabel("density, in the layers that attend to everything")
    axis.set_ylabel("1, less the share of prompts that only dense attention\nanswers, on the task that loses most")
    axis.grid(visible=True, alpha=0.25)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.set_title(f"{_length(result):,} tokens; {result['device']}; {result['date']}", fontsize=9, color="gray")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
