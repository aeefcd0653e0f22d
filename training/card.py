"""The recall tables of the model card, made from the committed results.

    python -m training.card

rewrites what stands between the two marks of the card, and draws the heat map and the plot of the docs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from longreach.bench.recall.measure import table

ROOT = Path(__file__).parents[1]
CARD = ROOT / "server" / "longreach" / "default_model" / "README.md"
RESULTS = Path(__file__).with_name("results")
OTHERS = tuple(RESULTS / f"seed-{seed}" for seed in (31, 7, 23))  # of the same plans: other prompts
PICTURES = ROOT / "docs" / "pictures"
BEGIN, END = "<!-- recall: begin -->", "<!-- recall: end -->"

LOW = 0.95  # what phrasings that training never used are to reach
TITLES = {
    "plain": "Usual phrasings, text of the kinds that it was trained on",
    "held_out": "Phrasings that training never used",
    "unseen_text": "Text of kinds that training never used: German and Spanish, C and SQL, logs, an old novel",
    "long": "Beyond the longest trained length, 32,768 tokens",
    "window": "Its full layers restricted to the last 1,024 tokens and 4 sinks",
    "server": "Through `longreach serve`, on a CPU",
}


def measured(directory: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The committed results by name, in the order of the card."""
    paths = {name: directory / f"recall-{name}.json" for name in TITLES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def renewed(page: str, begin: str, inside: str, end: str) -> str:
    """The page with `inside` between its marks."""
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{inside}\n{end}{after}"


def other(result: dict[str, Any]) -> str:
    """A sentence about other prompts of a plan: the mean of each length, and which cells lie below 0.95."""
    plan, rows = result["plan"], result["rows"]
    lengths = {row["length"]: [r["exact"] for r in rows if r["length"] == row["length"]] for row in rows}
    means = ", ".join(f"{mean(found):.3f} at {length:,}" for length, found in lengths.items())
    low = [f"{row['task']} at {row['length']:,} {row['exact']:.2f}" for row in rows if row["exact"] < LOW]
    below = f"below {LOW:.2f}: {', '.join(low)}" if low else f"no cell below {LOW:.2f}"
    return f"Other prompts (seed {plan['seed']}, {plan['count']} a cell), all tasks: {means} tokens; {below}."


def tables(results: dict[str, dict[str, Any]], others: Sequence[dict[str, dict[str, Any]]]) -> str:
    """Markdown: each result's table under its title, and what other prompts say of it."""
    parts = []
    for name, result in results.items():
        parts.append(f"**{TITLES[name]}**\n\n{table(result)}")
        if said := [other(found[name]) for found in others if name in found]:
            parts.append("\n".join(said) + "\n")
    return "\n".join(parts).strip()


def draw_window(dense: dict[str, Any], windowed: dict[str, Any], path: Path) -> None:
    """Single needles by length: dense attention, and the same weights with windows everywhere."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for label, result in (("dense", dense), ("window of 1,024 and 4 sinks", windowed)):
        points = {row["length"]: row["exact"] for row in result["rows"] if row["task"] == "single"}
        axes.plot(list(points), list(points.values()), "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="prompt tokens", ylabel="exact match, single needle", ylim=(-0.02, 1.04))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Rewrite the tables of the card and the pictures."""
    from longreach.bench.recall.heatmap import draw

    results = measured()
    inside = tables(results, [measured(directory) for directory in OTHERS])
    CARD.write_text(renewed(CARD.read_text(), BEGIN, inside, END))
    PICTURES.mkdir(exist_ok=True)
    for name in ("plain", "held_out"):
        if name in results:
            draw(results[name], PICTURES / f"recall-{name}.png")
    if {"plain", "window"} <= set(results):
        draw_window(results["plain"], results["window"], PICTURES / "recall-window.png")


if __name__ == "__main__":
    main()
