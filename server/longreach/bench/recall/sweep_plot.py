"""The picture of the suite `ruler-like`: answers against what was computed, a panel for each length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longreach.bench.policy_sweep import DENSE
from longreach.bench.recall.sweep_table import computed, dense_of, lengths_of, picks, right, series
from longreach.util.extras import require


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: the share of right answers by density, or by what answers read under a budget; a line for each
    policy, a ring around its picked setting, and dense attention as a dashed line.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require("matplotlib", "bench")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lengths = lengths_of(result)
    picked = set(picks(result).values())
    rows = [row for row in result["curves"] if row["setting"] != DENSE and right(row)[1]]
    policies = list(dict.fromkeys(map(series, rows)))
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(0.6 + 3.6 * len(lengths), 4.2), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, length in zip(axes[0], lengths, strict=True):
        dense = right(dense_of(result, length))
        if dense[1]:
            axis.axhline(dense[0] / dense[1], color="gray", linestyle="--", linewidth=1, label="dense")
        for i, policy in enumerate(policies):
            here = [row for row in rows if series(row) == policy and row["tokens"] == length]
            points = sorted((computed(row), right(row)[0] / right(row)[1], row["setting"]) for row in here)
            axis.plot([p[0] for p in points], [p[1] for p in points], marker=".", color=f"C{i}", label=policy)
            ring = [point for point in points if point[2] in picked]
            axis.plot([p[0] for p in ring], [p[1] for p in ring], "o", mfc="none", ms=11, color=f"C{i}")
        axis.set_title(f"{length:,} tokens", fontsize=10)
        axis.set_xlim(-0.03, 1.03)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(visible=True, alpha=0.25)
    axes[0, 0].set_ylabel("answered right")
    figure.supxlabel("density, or share of keys that answers read", fontsize=9)
    found = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    where = result["environment"]
    figure.suptitle(f"{result['model']['name']}; {where['device']}; {where['date']}", fontsize=9, color="gray")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
