"""Draw the training curve from the committed log: `python -m training.curve` writes training/curve.png."""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

LOG = Path(__file__).with_name("log.jsonl")


def main() -> None:
    """One panel: exact match on the fixed prompts against millions of tokens, by length and kind; a line between
    runs.
    """
    figure, axes = plt.subplots(figsize=(7, 3.6))
    curves: dict[str, tuple[list[float], list[float]]] = {}
    tokens = before = 0.0
    for line in LOG.read_text().splitlines():
        entry = json.loads(line)
        if entry.get("event") == "end":
            before += entry["tokens"] / 1e6
            axes.axvline(before, color="0.8", linewidth=1)
        elif entry.get("event") == "score":
            for name, value in entry.items():
                if "/" in name:
                    xs, ys = curves.setdefault(name, ([], []))
                    xs.append(tokens)
                    ys.append(value)
        elif "tokens" in entry:
            tokens = before + entry["tokens"] / 1e6
    for name, (xs, ys) in curves.items():
        axes.plot(xs, ys, "--" if name.endswith("held_out") else "-", label=name.replace("_", " "), linewidth=1.2)
    axes.set(xlabel="million tokens", ylabel="exact match", ylim=(0, 1.01))
    axes.legend(fontsize=7, ncols=2, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("curve.png"), dpi=110)


if __name__ == "__main__":
    main()
