"""Draw what others wait for while one long prompt is read, from a result of `benchmarks.compare --suites fairness`."""

from __future__ import annotations

from pathlib import Path

_COLORS = ("#17606a", "#b9b4a6")
_NAMES = {"vllm": "vLLM, defaults"}


def panels(result: dict) -> list[tuple[str, str, list[float]]]:
    """Title, unit and the value of each server, of what is drawn."""
    found = [run["fairness"] for run in result["runs"]]
    length = f"{found[0]['long_prompt_tokens'] // 1024}K"
    return [
        ("first token of a short prompt\nthat comes meanwhile", "s", [one["newcomer_ttft_s"] for one in found]),
        (
            f"delay between tokens of\n{found[0]['streams']} running answers, p99",
            "ms",
            [1000 * one["itl_beside_s"]["p99"] for one in found],
        ),
        (f"first token of the\n{length} prompt itself", "s", [one["long_ttft_s"] for one in found]),
    ]


def draw(result: dict, path: Path) -> None:
    """Three pairs of bars: a short prompt, running answers, and the long prompt, which pays for them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [_NAMES.get(run["name"], run["name"]) for run in result["runs"]]
    found = panels(result)
    figure, axes = pyplot.subplots(1, len(found), figsize=(9, 2.9), layout="constrained", facecolor="white")
    for axis, (title, unit, values) in zip(axes, found, strict=True):
        bars = axis.bar(names, values, 0.55, color=_COLORS[: len(values)])
        axis.bar_label(bars, [_shown(value, unit) for value in values], padding=3, fontsize=11, fontweight="bold")
        axis.set_title(title, fontsize=10)
        axis.set_ylim(0, 1.18 * max(values))
        axis.set_yticks([])
        axis.tick_params(axis="x", length=0)
        axis.spines[["top", "left", "right"]].set_visible(False)
    tokens = f"{result['runs'][0]['fairness']['long_prompt_tokens']:,}"
    figure.suptitle(f"While a prompt of {tokens} tokens is read", fontsize=12, fontweight="bold")
    model = f"{result['model']['shape']} shape, {result['model']['weights']} weights"
    where = f"{model}; {result['environment']['device']}; one run; less is better"
    figure.supxlabel(where, fontsize=8, color="gray")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _shown(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 20 else f"{value:.2g} {unit}" if value < 10 else f"{value:.1f} {unit}"
