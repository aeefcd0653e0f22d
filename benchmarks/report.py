"""Write the results as Markdown tables and draw them: one table for each JSON, and one PNG if it tells of speed.

    python -m benchmarks.report benchmarks/results/*.json

The table goes between the markers `<!-- results: NAME -->` and `<!-- end -->` of the pages below, where NAME is the
file's stem; `--check` changes nothing and fails if a page is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from longreach.bench import load_plot, load_report, report
from longreach.bench.recall import sweep_plot, sweep_table

from benchmarks import (
    answers_report,
    attacks,
    beside_vllm,
    decode_budget,
    disk_endurance,
    disk_restart,
    estimates,
    fairness_plot,
    install,
    mass_predicts,
    min_mass,
    one_prompt,
    policy_cost,
    profile_kernels,
    quality_report,
    training_steps,
    upload,
    upload_too_long,
)
from benchmarks.attention_methods import tables as methods
from benchmarks.kernels import measure as kernels

ROOT = Path(__file__).resolve().parent.parent
_NAMES = (
    "benchmarks",
    "benchmarks-attention",
    "benchmarks-caches",
    "benchmarks-load",
    "benchmarks-models",
    "kernels",
    "context-parallel",
    "attention-methods",
    "attention-policies",
    "embedded-model-policies",
    "install",
)
FAIRNESS = "serving-fairness-h200"  # the README's picture is of it
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in _NAMES), ROOT / "README.md", ROOT / "SECURITY.md")


def choices_table(result: dict) -> str:
    """Times of `benchmarks/dynamic.py` at the longest length, as shares of dense attention's, and the mass kept.

    `choosing` leaves out the plan, where it was timed apart: the layers of a step share it.
    """
    length = max(row["tokens"] for row in result["rows"])
    lines = [["inputs", "choice", "of dense", "choosing", "density", "mass kept: mean", "p5", "min"]]
    lines.append(["---", "---", *["---:"] * 6])
    for row in (row for row in result["rows"] if row["tokens"] == length):
        numbers = [row["of_dense"], row.get("choose_ms", row["select_ms"]) / row["dense_ms"], row["density"]]
        numbers += [row["kept_mean"], row["kept_p5"], row["kept_min"]]
        lines.append([row["inputs"], row["choice"], *(f"{number:.3f}" for number in numbers)])
    where = result["environment"]
    dense = sorted({f"{row['dense_ms']:.1f}" for row in result["rows"] if row["tokens"] == length}, key=float)
    caption = (
        f"{length:,} tokens; dense {' to '.join(dict.fromkeys((dense[0], dense[-1])))} ms a layer; {where['device']}; "
    )
    caption += f"torch {where['torch']}; {where['date']}."
    plans = [row["plan_ms"] for row in result["rows"] if row["tokens"] == length and "plan_ms" in row]
    if plans:
        caption += (
            f" What the layers of a step share takes {plans[0]:.2f} ms once; it is in the times, not in `choosing`."
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def exchanges_table(result: dict) -> str:
    """Times of `benchmarks/context_parallel.py`, and their share of one GPU's."""
    exchanges = list(dict.fromkeys(row["exchange"] for row in result["rows"]))
    lines = [["mask", "tokens", *(f"{name} (ms)" for name in exchanges)]]
    lines.append(["---", *["---:"] * (len(exchanges) + 1)])
    cases: dict[tuple[str, int], dict[str, dict]] = {}
    for row in result["rows"]:
        cases.setdefault((row["mask"], row["tokens"]), {})[row["exchange"]] = row
    for (mask, tokens), rows in cases.items():
        times = [f"{rows[name]['ms']:.2f}" for name in exchanges]
        shares = ["" if name == exchanges[0] else f" ({rows[name]['of_one_gpu']:.2f})" for name in exchanges]
        lines.append([mask, f"{tokens // 1024}K", *(time + share for time, share in zip(times, shares, strict=True))])
    where = result["environment"]
    caption = f"in brackets the share of one GPU's time; {where['ranks']} × {where['device']}; torch {where['torch']}; "
    caption += f"{where['date']}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def errors_table(result: dict) -> str:
    """Root mean square errors of `benchmarks/fp8_accuracy.py`, in percent."""
    names = list(result["rows"][0]["errors"])
    lines = [["inputs", "keys", *names], ["---", "---:", *["---:"] * len(names)]]
    for row in result["rows"]:
        errors = (f"{100 * row['errors'][name]['rms']:.2f}" for name in names)
        lines.append([row["distribution"], f"{row['keys']:,}", *errors])
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version[0].isdigit())
    caption = f"percent of the result's root mean square; {where['device']}; {versions}; {where['date']}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


# What a result has, or each of its rows, and what makes its table; the first that fits.
_TABLES = {
    "suite": sweep_table.table,
    "restarts": disk_restart.table,
    "endured": disk_endurance.table,
    "one_prompt": one_prompt.table,
    "attacks": attacks.table,
    "uploads": upload.table,
    "too_long": upload_too_long.table,
    "profiles": profile_kernels.table,
    "methods": methods.table,
    "attentions": training_steps.table,
    "curves": quality_report.table,  # which has times, too
    "times": min_mass.table,
    "ceilings": kernels.table,
    "policies": load_report.table,
    "runs": report.table,
}
_ROW_TABLES = {
    "clone_git_mb": install.table,
    "suite": sweep_table.table,
    "exchange": exchanges_table,
    "budget": decode_budget.table,
    "ahead": estimates.table,
    "task": answers_report.table,
    "loss": mass_predicts.table,
    "unchosen": policy_cost.table,
    "choice": choices_table,
    "errors": errors_table,
}


def table(result: dict) -> str:
    """The Markdown table of a result, by what it or its rows have.

    Raises:
        ValueError: it has nothing that a table is known for.
    """
    for name, written in _TABLES.items():
        if name in result:
            return written(result)
    for name, written in _ROW_TABLES.items():
        if name in result["rows"][0]:
            return written(result)
    raise ValueError(f"no table is known for a result with {', '.join(result)}")


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


PICTURES = {
    "suite": sweep_plot.draw,
    "ceilings": draw_kernels,
    "runs": report.draw,
    "policies": load_plot.draw,
    "methods": methods.draw,
    "attentions": training_steps.draw,
    "curves": quality_report.draw,
}


def picture_of(result: dict) -> Callable[[dict, Path], None] | None:
    """What draws a result. None where there is nothing to draw, as of budgets, which have no speed-up, of a single
    setting, or of runs without a curve."""
    if (
        "suite" not in result
        and "curves" in result
        and (quality_report.is_of_budgets(result) or quality_report.is_by_task(result))
    ):
        return None
    if "runs" in result and not any(run["rows"] for run in result["runs"]):
        return None
    found = next((draw for kind, draw in PICTURES.items() if kind in result), None)
    if found is None and "task" in result.get("rows", [{}])[0] and answers_report.on_curves(result):
        return answers_report.draw
    return found


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
        draw = picture_of(result)
        if draw is not None and not args.check:
            draw(result, path.with_suffix(".png"))
        if path.stem == FAIRNESS and not args.check:
            fairness_plot.draw(result, ROOT / "docs" / "pictures" / "behind-a-long-prompt.png")
    pages = {name: insert(page, beside_vllm.NAME, beside_vllm.table()) for name, page in pages.items()}
    if args.check:
        stale = [path.name for path in PAGES if pages[path] != before[path]]
        sys.exit(f"{', '.join(stale)} differ from the results; run python -m benchmarks.report" if stale else 0)
    for path, page in pages.items():
        path.write_text(page)


if __name__ == "__main__":
    main()
