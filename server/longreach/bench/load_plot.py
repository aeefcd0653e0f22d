"""The result of a load test as a picture: panels over context length, on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longreach.bench.load_report import FEWEST_SAMPLES, cold_rows, growth, rows_by_concurrency, speedups
from longreach.bench.report import set_log_y
from longreach.util.extras import require

Series = Callable[[dict[str, Any]], tuple[list[int], list[float]]]


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG with a panel for each: TTFT with its exponent, ITL, and what else was measured.

    The others are memory, speed-up of policies over dense attention, recall, and TTFT under arrivals.

    Raises:
        ValueError: matplotlib is not installed, or nothing was measured.
    """
    require("matplotlib", "bench")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [panel for panel in _PANELS if panel[2](result)]
    if not panels:
        raise ValueError("nothing was measured: the server takes none of the prompt lengths")
    rows = rows_of(len(panels))
    figure = pyplot.figure(figsize=(4.4 * max(rows), 3.6 * len(rows)), layout="constrained")
    width = math.lcm(*rows)
    grid = figure.add_gridspec(len(rows), width)
    places = [
        (row, slice(place * width // count, (place + 1) * width // count))
        for row, count in enumerate(rows)
        for place in range(count)
    ]
    for (row, columns), (title, plot, _) in zip(places, panels, strict=True):
        axis = figure.add_subplot(grid[row, columns])
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        plot(axis, result)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K" if value >= 1024 else f"{value:g}")
        axis.set_xlabel(axis.get_xlabel() or "prompt tokens", fontsize=9)
        axis.grid(visible=True, which="both", alpha=0.25)
        axis.legend(frameon=False, fontsize=7)
    where, model = result["environment"], result["model"]
    name = model.get("name") or f"{model['shape']} shape, {model['weights']} weights"
    figure.suptitle(f"{name}; {where['device']}; {where['date']}", fontsize=9, color="gray")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def rows_of(panels: int) -> list[int]:
    """How many panels each row of the picture has: at most three or four, and no row with a hole."""
    if panels <= 3:
        return [panels]
    return [-(-panels // 2), panels // 2]


def _ttft(axis: Any, result: dict[str, Any]) -> None:
    for policy in result["policies"]:
        colors: dict[int, str] = {}
        law = growth(policy)
        for count, rows in rows_by_concurrency(policy).items():
            lengths = [row["prompt_tokens"] for row in rows]
            fits = law is not None and not colors
            label = _named(policy, count) + (f", N^{law.exponent:.2f}" if fits and law else "")
            colors[count] = _band(axis, lengths, rows, "ttft_s", 1.0, label).get_color()
            if fits and law:
                axis.plot(lengths, [law.at(n) for n in lengths], linestyle=":", color=colors[count], linewidth=1)
        for count, rows in rows_by_concurrency(policy, "cached").items():
            lengths = [row["prompt_tokens"] for row in rows]
            values = [row["ttft_s"]["p50"] for row in rows]
            label = f"{_named(policy, count)}, prefix cached"
            axis.plot(lengths, values, marker="s", linestyle="--", color=colors.get(count), label=label)
    set_log_y(axis)


def _itl(axis: Any, result: dict[str, Any]) -> None:
    for policy in result["policies"]:
        for count, rows in rows_by_concurrency(policy).items():
            contexts = [row["prompt_tokens"] + row["max_tokens"] // 2 for row in rows]
            _band(axis, contexts, rows, "itl_s", 1e3, _named(policy, count))
    axis.set_xlabel("tokens of context")
    set_log_y(axis)


def _arrivals(axis: Any, result: dict[str, Any]) -> None:
    for policy in result["policies"]:
        for row in policy["arrivals"]:
            lengths = [part["prompt_tokens"] for part in row["by_length"]]
            label = f"{policy['name']}, {row['rate_per_s']:g} requests/s"
            _band(axis, lengths, row["by_length"], "ttft_s", 1.0, label)
    set_log_y(axis)


def _gpu_memory(axis: Any, result: dict[str, Any]) -> None:
    _lines(axis, result, "gpu_memory_gib", 1.0)


def _cache(axis: Any, result: dict[str, Any]) -> None:
    _lines(axis, result, "kv_cache_usage", 100.0)


def _speedup(axis: Any, result: dict[str, Any]) -> None:
    dense, *others = result["policies"]
    for policy in others:
        gain = speedups(policy, dense)
        axis.plot(list(gain), list(gain.values()), marker="o", label=policy["name"])
    axis.axhline(1, color="gray", linewidth=0.8)


def _recall(axis: Any, result: dict[str, Any]) -> None:
    for policy in (policy for policy in result["policies"] if "recall" in policy):
        rows = policy["recall"]
        lengths = [row["prompt_tokens"] for row in rows]
        axis.plot(lengths, [row["exact"] for row in rows], marker="o", label=policy["name"])
    axis.set_ylim(-0.03, 1.03)


def _band(axis: Any, xs: list[int], rows: list[dict[str, Any]], key: str, unit: float, label: str) -> Any:
    """The median as a line, and up to p99 as a band, where there are enough samples to have one."""
    median = [row[key]["p50"] * unit for row in rows]
    (line,) = axis.plot(xs, median, marker="o", label=label)
    enough = [row[key]["count"] >= FEWEST_SAMPLES for row in rows]
    p99 = [row[key]["p99"] * unit for row in rows]
    axis.fill_between(xs, median, p99, where=enough, color=line.get_color(), alpha=0.15, lw=0)
    return line


def _named(policy: dict[str, Any], concurrency: int) -> str:
    return f"{policy['name']}, {concurrency} at once"


def _lines(axis: Any, result: dict[str, Any], key: str, unit: float) -> None:
    for policy in result["policies"]:
        rows = [row for row in cold_rows(policy) if row[key] is not None]
        lengths = [row["prompt_tokens"] for row in rows]
        axis.plot(lengths, [row[key] * unit for row in rows], marker="o", label=policy["name"])
    axis.set_ylim(bottom=0)


def _measured(key: str) -> Callable[[dict[str, Any]], bool]:
    return lambda result: any(row[key] is not None for policy in result["policies"] for row in cold_rows(policy))


def _has(key: str) -> Callable[[dict[str, Any]], bool]:
    return lambda result: any(policy.get(key) for policy in result["policies"])


# Title, what draws it, and whether there is anything to draw.
_PANELS: tuple[tuple[str, Callable[[Any, dict[str, Any]], None], Callable[[dict[str, Any]], bool]], ...] = (
    ("time to first token (s), p50 to p99", _ttft, _has("rows")),
    ("inter-token latency (ms), p50 to p99", _itl, _has("rows")),
    ("time to first token under arrivals (s)", _arrivals, _has("arrivals")),
    ("GPU memory in use (GiB)", _gpu_memory, _measured("gpu_memory_gib")),
    ("KV cache in use (%)", _cache, _measured("kv_cache_usage")),
    ("speed-up of TTFT over dense", _speedup, lambda result: len(result["policies"]) > 1),
    ("recall of one fact", _recall, _has("recall")),
)
