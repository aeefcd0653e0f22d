"""The recall tables of the model card, made from the committed results.

    python -m training.card

rewrites what stands between the two marks of the card, and draws the heat map and the plot of the docs.
"""

import json
from pathlib import Path
from typing import Any

from longreach.bench.recall.measure import table

ROOT = Path(__file__).parents[1]
CARD = ROOT / "server" / "longreach" / "default_model" / "README.md"
RESULTS = Path(__file__).with_name("results")
PICTURES = ROOT / "docs" / "pictures"
BEGIN, END = "<!-- recall: begin -->", "<!-- recall: end -->"

TITLES = {
    "plain": "Usual phrasings, text of the kinds that it was trained on",
    "held_out": "Phrasings that training never used",
    "unseen_text": "Text of kinds that training never used: German and Spanish, C and SQL, logs, an old novel",
    "long": "Beyond the longest trained length, 32,768 tokens",
    "window": "Its full layers restricted to the last 1,024 tokens and 4 sinks",
    "server": "Through `longreach serve`, on a CPU",
}


def measured() -> dict[str, dict[str, Any]]:
    """The committed results by name, in the order of the card."""
    paths = {name: RESULTS / f"recall-{name}.json" for name in TITLES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def tables(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: each result's table under its title."""
    return "\n".join(f"**{TITLES[name]}**\n\n{table(result)}" for name, result in results.items()).strip()


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
    text = CARD.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    CARD.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}")
    PICTURES.mkdir(exist_ok=True)
    for name in ("plain", "held_out"):
        if name in results:
            draw(results[name], PICTURES / f"recall-{name}.png")
    if {"plain", "window"} <= set(results):
        draw_window(results["plain"], results["window"], PICTURES / "recall-window.png")


if __name__ == "__main__":
    main()
