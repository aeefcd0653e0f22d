"""Write the results as Markdown tables and draw them: one table for each JSON, and one PNG if it tells of speed.

    python benchmarks/report.py benchmarks/results/*.json

The table goes between the markers `<!-- results: NAME -->` and `<!-- end -->` of docs/benchmarks.md and the README,
where NAME is the file's stem; `--check` changes nothing and fails if a page is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from longreach.bench import kernels

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")


def table(result: dict) -> str:
    """A Markdown table: of kernels, of errors, or with a row for each length and the columns of each run."""
    if "ceilings" in result:
        return kernels.table(result)
    if "runs" not in result:
        return _errors(result)
    runs = result["runs"]
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
    model = result.get("model")
    what = f"{model['shape']} shape, {model['weights']} weights, {model['dtype']}; " if model else ""
    return _markdown(lines, what, result["environment"])


def _errors(result: dict) -> str:
    """Root mean square errors of `benchmarks/fp8_accuracy.py`, in percent."""
    names = list(result["rows"][0]["errors"])
    lines = [["inputs", "keys", *names], ["---", "---:", *["---:"] * len(names)]]
    for row in result["rows"]:
        errors = (f"{100 * row['errors'][name]['rms']:.2f}" for name in names)
        lines.append([row["distribution"], f"{row['keys']:,}", *errors])
    return _markdown(lines, "percent of the result's root mean square; ", result["environment"])


def _markdown(lines: list[list[str]], what: str, where: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version[0].isdigit())
    caption = f"{what}{where['device']}; {versions}; {where['date']}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def _cells(row: dict) -> list[str]:
    ttft, itl = row["ttft_s"], row["itl_s"]
    return [f"{ttft['p50']:.3f} / {ttft['p99']:.3f}", f"{1e3 * itl['p50']:.2f} / {1e3 * itl['p99']:.2f}"]


def draw(result: dict, path: Path) -> None:
    """TTFT and ITL against prompt length, on logarithmic axes; the line is the median and the band reaches to p99."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, key, unit, title in [
        (axes[0], "ttft_s", 1.0, "time to first token (s)"),
        (axes[1], "itl_s", 1e3, "inter-token latency (ms)"),
    ]:
        for run in result["runs"]:
            lengths = [row["prompt_tokens"] for row in run["rows"]]
            median = [row[key]["p50"] * unit for row in run["rows"]]
            worst = [row[key]["p99"] * unit for row in run["rows"]]
            (line,) = axis.plot(lengths, median, marker="o", label=run["name"])
            axis.fill_between(lengths, median, worst, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
        axis.set_xlabel("prompt tokens")
        axis.set_title(title)
        axis.grid(visible=True, which="both", alpha=0.25)
    axes[0].legend(frameon=False)
    figure.suptitle(result["environment"]["device"], fontsize=9, color="gray")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_kernels(result: dict, path: Path) -> None:
    """Speed of each implementation in each case, as a share of the machine's ceiling measured in the same run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = result["rows"]
    names = sorted({name for row in rows for name in row["ms"]})
    figure, axis = pyplot.subplots(figsize=(9, 0.55 * len(rows) + 1.4), layout="constrained")
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [(at, row) for at, row in enumerate(rows) if name in row["ms"]]
        shares = [kernels.share_of_ceiling(row, name, result["ceilings"]) for _, row in places]
        axis.barh([at + (i + 0.5) * height - 0.4 for at, _ in places], shares, height, label=name)
    axis.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("share of the measured ceiling: matrix product, or copy for decodes")
    axis.grid(visible=True, axis="x", alpha=0.25)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.set_title(result["environment"]["device"], fontsize=9, color="gray")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def insert(page: str, name: str, text: str) -> str:
    """The page with the table `name` replaced wherever it has markers for it."""
    pattern = re.compile(rf"(<!-- results: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: match[1] + "\n" + text + "\n" + match[2], page)


def main() -> None:
    """Update the page and the pictures, or with --check compare the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    before = {path: path.read_text() for path in PAGES}
    pages = dict(before)
    for path in args.results:
        if not any(f"<!-- results: {path.stem} -->" in page for page in pages.values()):
            sys.exit(f"no page has markers for the results {path.stem!r}")
        result = json.loads(path.read_text())
        pages = {name: insert(page, path.stem, table(result)) for name, page in pages.items()}
        if not args.check and ("ceilings" in result or "runs" in result):
            (draw_kernels if "ceilings" in result else draw)(result, path.with_suffix(".png"))
    if args.check:
        stale = [path.name for path in PAGES if pages[path] != before[path]]
        sys.exit(f"{', '.join(stale)} differ from the results; run benchmarks/report.py" if stale else 0)
    for path, page in pages.items():
        path.write_text(page)


if __name__ == "__main__":
    main()
