"""Draw the training curve from the committed log: `python -m training.curve` writes training/curve.png."""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

LOG = Path(__file__).with_name("log.jsonl")


def main() -> None:
    """Left: exact match on the fixed prompts against steps, by cell, a line where a stage begins. Right: the losses."""
    figure, (scores, losses) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    cells: dict[str, list[tuple[int, float]]] = {}
    curves: dict[str, list[tuple[int, float]]] = {"answer": [], "text": []}
    for line in LOG.read_text().splitlines():
        entry = json.loads(line)
        if entry.get("event") == "stage":
            scores.axvline(entry["step"], color="0.8", linewidth=1)
        elif entry.get("event") == "score":
            for name, value in entry.items():
                if name not in ("seconds", "event", "step"):
                    cells.setdefault(name, []).append((entry["step"], value))
        elif "answer" in entry:
            for name, points in curves.items():
                points.append((entry["step"], entry[name]))
    for number, (name, points) in enumerate(cells.items()):
        style = {"color": "k", "linewidth": 2} if name == "mean" else {"linewidth": 1}
        scores.plot(*zip(*points, strict=True), ("-", "--")[number // 10 % 2], label=name, **style)
    scores.set(xlabel="step", ylabel="exact match", ylim=(0, 1.01))
    scores.legend(fontsize=7, ncols=2, loc="lower right")
    for name, points in curves.items():
        losses.plot(*zip(*points, strict=True), label=name, linewidth=0.7)
    losses.set(xlabel="step", ylabel="loss, nats a token", yscale="log")
    losses.legend()
    figure.savefig(Path(__file__).with_name("curve.png"), dpi=110)


if __name__ == "__main__":
    main()
