"""What was wanted of the model's recall, and the least that was measured: the table in training/README.md.

    python -m training.bars

rewrites what stands between the two marks there, from the committed results of both runs of the training command.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from training.card import RESULTS, measured, renewed
from training.evaluate import NEEDLES

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- bars: begin -->", "<!-- bars: end -->"
COLUMNS = {
    "1,000, seed 47": RESULTS,
    "1,000, seed 31": RESULTS / "seed-31",
    "100, seed 7": RESULTS / "seed-7",
    "100, seed 23": RESULTS / "seed-23",
    "H100: 1,000, seed 31": RESULTS / "h100",
    "H100: 100, seed 7": RESULTS / "h100" / "seed-7",
    "H100: 100, seed 23": RESULTS / "h100" / "seed-23",
}

Results = dict[str, dict[str, Any]]  # by plan, see `longreach bench recall`
Values = Iterator[tuple[float, str]]  # and what each is of


def rows(results: Results, *plans: str) -> Iterator[dict[str, Any]]:
    """The rows of those of `plans` that were measured."""
    for plan in plans:
        yield from results.get(plan, {"rows": []})["rows"]


def named(row: dict[str, Any]) -> str:
    return f"{row['task']} at {row['length']:,}"


def each(plan: str, *tasks: str, length: int | None = None) -> Callable[[Results], Values]:
    """The exact answers of a plan's cells, of all tasks where none are named, and of all lengths or of one."""

    def values(results: Results) -> Values:
        for row in rows(results, plan):
            if (row["task"] in tasks or not tasks) and length in (None, row["length"]):
                yield row["exact"], named(row)

    return values


def by_length(plan: str) -> Callable[[Results], Values]:
    """The mean over the tasks of a plan, by length."""

    def values(results: Results) -> Values:
        found = list(rows(results, plan))
        for length in dict.fromkeys(row["length"] for row in found):
            yield mean(row["exact"] for row in found if row["length"] == length), f"{length:,}"

    return values


def alarms(results: Results) -> Values:
    """How often something that is stated is called not stated."""
    for row in rows(results, "plain", "held_out", "unseen_text"):
        if row["task"] != "absent":
            yield row["false_alarms"], named(row)


def lost(results: Results) -> Values:
    """What text of other kinds costs, by task."""
    usual = {(row["task"], row["length"]): row["exact"] for row in rows(results, "plain")}
    for row in rows(results, "unseen_text"):
        if usual:
            yield round(usual[row["task"], row["length"]] - row["exact"], 4), named(row)


@dataclass(frozen=True)
class Bar:
    """A limit for each of the `values`: the least that they may be, or with `most` the most."""

    label: str
    wanted: float
    values: Callable[[Results], Values]
    most: bool = False

    def worst(self, results: Results) -> tuple[float, str] | None:
        """The value nearest to the limit or beyond it, and what it is of; None where nothing was measured."""
        return (max if self.most else min)(self.values(results), default=None)

    def short(self, value: float) -> bool:
        return value > self.wanted if self.most else value < self.wanted


BARS = (
    Bar("one fact, one of many, one key of many, key-value pairs", 0.99, each("plain", *NEEDLES)),
    Bar("all values, chains", 0.95, each("plain", "multivalue", "chain")),
    Bar("phrasings that it was never trained on, mean of the tasks at a length", 0.95, by_length("held_out")),
    Bar("such phrasings, each task at each length", 0.95, each("held_out")),
    Bar("what is not stated is called so", 0.95, each("plain", "absent")),
    Bar("false alarms, at most", 0.02, alarms, most=True),
    Bar("lost in text of other kinds at 16,384 tokens, at most", 0.02, lost, most=True),
    Bar("single facts of 65,536 tokens, 100 prompts", 0.99, each("long", length=65536)),
    Bar("single facts of 131,072 tokens, 100 prompts", 0.95, each("long", length=131072)),
)


def table(columns: dict[str, Results]) -> str:
    """Markdown: the worst value of each bar in each column, bold where it is short; then which values are short."""
    lines = [f"| | wanted | {' | '.join(columns)} |", f"|---|---:|{'---:|' * len(columns)}"]
    for bar in BARS:
        cells = []
        for results in columns.values():
            worst = bar.worst(results)
            text = "–" if worst is None else f"{worst[0]:.3f}"
            cells.append(f"**{text}**" if worst and bar.short(worst[0]) else text)
        lines.append(f"| {bar.label} | {bar.wanted:.2f} | {' | '.join(cells)} |")
    short = [
        f"- {name}: {', '.join(f'{what} has {value:.3f}' for value, what in sorted(found))} ({bar.label})"
        for name, results in columns.items()
        for bar in BARS
        if (found := [(value, what) for value, what in bar.values(results) if bar.short(value)])
    ]
    return "\n".join([*lines, "", *(["Short of it are:", "", *short] if short else ["Nothing is short of it."])])


def written(text: str) -> str:
    """The page with the table as the committed results have it."""
    return renewed(text, BEGIN, table({name: measured(directory) for name, directory in COLUMNS.items()}), END)


def main() -> None:
    """Rewrite the table."""
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
