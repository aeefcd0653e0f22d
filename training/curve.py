"""Draw the training curve from the committed log: `python -m training.curve` writes training/curve.png."""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
LOG = HERE / "log.jsonl"


def main() -> None:
    """Exact match on the fixed prompts against steps, by cell, a line where a stage begins: left in phrasings of
    training, in the middle in held-out ones. Right: the losses.
    """
    figure, (scores, held_out, losses) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    cells: dict[str, list[tuple[int, float]]] = {}
    curves: dict[str, list[tuple[int, float]]] = {"answer": [], "text": []}
    for line in LOG.read_text().splitlines():
        entry = json.loads(line)
        if entry.get("event") == "stage":
            for axis in (scores, held_out):
                axis.axvline(entry["step"], color="0.8", linewidth=1)
        elif entry.get("event") == "score":
            for name, value in entry.items():
                if name not in ("seconds", "event", "step"):
                    cells.setdefault(name, []).append((entry["step"], value))
        elif "answer" in entry:
            for name, points in curves.items():
                points.append((entry["step"], entry[name]))
    for axis, chosen in ((scores, False), (held_out, True)):
        shown = {name: points for name, points in cells.items() if name.startswith("held_out") == chosen}
        for number, (name, points) in enumerate(shown.items()):
            style = {"color": "k", "linewidth": 2} if name == "mean" else {"linewidth": 1}
            label = name.removeprefix("held_out").strip(" /")
            axis.plot(*zip(*points, strict=True), ("-", "--")[number // 10 % 2], label=label, **style)
        title = "held-out phrasings" if chosen else "phrasings of training (mean: all cells)"
        axis.set(xlabel="step", ylabel="exact match", ylim=(0, 1.01), title=title)
        axis.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    for name, points in curves.items():
        losses.plot(*zip(*points, strict=True), label=name, linewidth=0.7)
    losses.set(xlabel="step", ylabel="loss, nats a token", yscale="log", title="losses")
    losses.legend()
    figure.savefig(HERE / "curve.png", dpi=110)


if __name__ == "__main__":
    main()
