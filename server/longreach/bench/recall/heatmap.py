"""The picture of a recall measurement: a square for each task, lengths across, depths down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longreach.util.extras import require


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG of recall by length and depth, one panel a task.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require("matplotlib", "bench")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    plan = result["plan"]
    found = {(row["task"], row["length"]): row["by_depth"] for row in result["rows"]}
    depths = sorted({depth for by_depth in found.values() for depth in by_depth}, key=float)
    columns = min(5, len(plan["tasks"]))
    rows = -(-len(plan["tasks"]) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(1.1 + 1.9 * columns, 0.6 + 1.7 * rows), squeeze=False, layout="constrained"
    )
    image = None
    for panel, task in zip(axes.flat, plan["tasks"], strict=False):
        shares = [[found[task, length].get(depth, float("nan")) for length in plan["lengths"]] for depth in depths]
        image = panel.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        panel.set_title(task, fontsize=9)
        panel.set_xticks(range(len(plan["lengths"])), [_short(length) for length in plan["lengths"]], fontsize=7)
        panel.set_yticks(range(len(depths)), [f"{float(depth):.0%}" for depth in depths], fontsize=7)
    for panel in list(axes.flat)[len(plan["tasks"]) :]:
        panel.axis("off")
    assert image is not None
    figure.colorbar(image, ax=axes, label="exact match", shrink=0.8)
    figure.supxlabel("prompt tokens", fontsize=9)
    figure.supylabel("depth of the fact", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)
