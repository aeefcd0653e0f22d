"""Results of `latency`, `throughput` and `compare` as Markdown tables, and latency as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longreach.util.extras import require


def table(result: dict[str, Any]) -> str:
    """Latency with a row for each length, then the other suites with a row for each figure; a column for each run."""
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version[0].isdigit())
    model = result.get("model", {})
    what = model.get("name", "")
    if "shape" in model:
        what = f"{model['shape']} shape, {model['weights']} weights, {model['dtype']}"
        what += f", {model['quantization']}" if "quantization" in model else ""
    caption = "; ".join(filter(None, [what, where["device"], versions, where["date"]]))
    tables = [lines for lines in (_latency(result["runs"]), _figures(result["runs"])) if len(lines) > 2]
    text = ["\n".join("| " + " | ".join(cells) + " |" for cells in lines) for lines in tables]
    return "\n\n".join([*text, f"{caption}.\n"])


def _latency(runs: list[dict[str, Any]]) -> list[list[str]]:
    runs = [run for run in runs if run["rows"]]
    by_length = {run["name"]: {row["prompt_tokens"]: row for row in run["rows"]} for run in runs}
    lengths = sorted({length for rows in by_length.values() for length in rows})
    head = ["prompt tokens"]
    for run in runs:
        head += [f"{run['name']}: TTFT p50 / p99 (s)", "ITL p50 / p99 (ms)"]
    lines = [head, ["---:"] * len(head)]
    for length in lengths:
        cells = [f"{length:,}"]
        for run in runs:
            row = by_length[run["name"]].get(length)
            cells += _cells(row) if row else ["", ""]
        lines.append(cells)
    return lines


def _cells(row: dict[str, Any]) -> list[str]:
    ttft, itl = row["ttft_s"], row["itl_s"]
    return [f"{ttft['p50']:.3f} / {ttft['p99']:.3f}", f"{1e3 * itl['p50']:.2f} / {1e3 * itl['p99']:.2f}"]


def _figures(runs: list[dict[str, Any]]) -> list[list[str]]:
    figures = {run["name"]: _figures_of(run) for run in runs}
    names = list(dict.fromkeys(name for of_run in figures.values() for name in of_run))
    lines = [["", *figures], ["---", *["---:"] * len(figures)]]
    return lines + [[name, *(of_run.get(name, "") for of_run in figures.values())] for name in names]


def _figures_of(run: dict[str, Any]) -> dict[str, str]:
    """The figures of all suites but latency, by what they are."""
    found: dict[str, str] = {}
    if run.get("start_s"):
        found["start-up (s)"] = f"{run['start_s']:.1f}"
    for row in run.get("throughput", []):
        tier = ", flex" if row.get("service_tier") == "flex" else ""
        what = f"{row['requests']} x {row['prompt_tokens']:,} tokens, {row['max_tokens']} out{tier} (s)"
        found[what] = f"{row['seconds']:.2f}"
    if beside := run.get("fairness"):
        before, during = beside["itl_before_s"], beside["itl_beside_s"]
        length = f"{beside['long_prompt_tokens']:,}"
        found[f"ITL of {beside['streams']} streams, p50 / p99 (ms)"] = _milliseconds(before)
        found[f"the same while {length} tokens are read (ms)"] = _milliseconds(during)
        found["TTFT of a short prompt that comes meanwhile (s)"] = f"{beside['newcomer_ttft_s']:.3f}"
        slower = beside["long_ttft_s"] / beside["long_ttft_alone_s"]
        found[f"TTFT of the {length} tokens (s; times alone)"] = f"{beside['long_ttft_s']:.2f}; {slower:.3f}"
    if again := run.get("reuse"):
        length = f"{again['prompt_tokens']:,}"
        found[f"TTFT of a second question on {length} tokens (s)"] = f"{again['second_question_ttft_s']:.3f}"
        share = again["retry_ttft_s"] / again["ttft_s"]
        found["TTFT of a retry after 90 percent (s; of the whole)"] = f"{again['retry_ttft_s']:.2f}; {share:.1%}"
    return found


def _milliseconds(summary: dict[str, float]) -> str:
    return f"{1e3 * summary['p50']:.2f} / {1e3 * summary['p99']:.2f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """TTFT and ITL against prompt length, on logarithmic axes; the line is the median and the band reaches to p99.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require("matplotlib", "bench")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, key, unit, title in [
        (axes[0], "ttft_s", 1.0, "time to first token (s)"),
        (axes[1], "itl_s", 1e3, "inter-token latency (ms)"),
    ]:
        for run in (run for run in result["runs"] if run["rows"]):
            lengths = [row["prompt_tokens"] for row in run["rows"]]
            median = [row[key]["p50"] * unit for row in run["rows"]]
            worst = [row[key]["p99"] * unit for row in run["rows"]]
            (line,) = axis.plot(lengths, median, marker="o", label=run["name"])
            axis.fill_between(lengths, median, worst, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K")
        set_log_y(axis)
        axis.set_xlabel("prompt tokens")
        axis.set_title(title)
        axis.grid(visible=True, which="both", alpha=0.25)
    axes[0].legend(frameon=False)
    figure.suptitle(result["environment"]["device"], fontsize=9, color="gray")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def set_log_y(axis: Any) -> None:
    """Make the values' axis logarithmic, with plain numbers: all of a decade's if it shows no more, else 1, 2 and 5."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    labelled = "123456789" if high < 5 * low else "25"
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in labelled else "")
