"""The result of `methods.py` as Markdown tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = {"forward": "forward", "both": "forward and backward"}
Cell = Callable[[dict[str, Any]], str | None]


def table(result: dict[str, Any]) -> str:
    """Times, memory, bytes and errors by length, recall, and what they were measured on."""
    tables = [_by_length(result, f"{PARTS[part]} (ms)", _milliseconds(part)) for part in PARTS]
    tables += [_by_length(result, f"peak of memory, {PARTS[part]} (GiB)", _memory(part)) for part in PARTS]
    tables += [
        _by_length(result, "bytes predicted, forward (GB)", _scaled("predicted_bytes", 1e9, ".3g")),
        _by_length(result, "bytes counted, forward (GB)", _scaled("dram_bytes", 1e9, ".3g")),
        _by_length(result, "share of the causal pairs", _scaled("density", 1, ".3f")),
        _errors(result),
        _recall(result),
    ]
    text = ["\n".join("| " + " | ".join(cells) + " |" for cells in lines) for lines in tables if len(lines) > 2]
    return "\n\n".join([*text, _caption(result)]) + "\n"


def _lengths(result: dict[str, Any]) -> list[int]:
    return sorted({row["tokens"] for row in result["rows"]})


def _by_length(result: dict[str, Any], title: str, cell: Cell) -> list[list[str]]:
    """A row for each method that has any such figure, a column for each length."""
    found = {(row["method"], row["tokens"]): row for row in result["rows"]}
    lengths = _lengths(result)
    lines = [[title, *map(_short, lengths)], ["---", *["---:"] * len(lengths)]]
    for method in result["methods"]:
        cells = [cell(found[method["name"], length]) for length in lengths]
        if any(cells):
            lines.append([method["name"], *(text or "" for text in cells)])
    return lines


def _milliseconds(part: str) -> Cell:
    def cell(row: dict[str, Any]) -> str | None:
        if part not in row:
            return None
        return row[part].get("failed") or f"{row[part]['ms']:.3g}"

    return cell


def _memory(part: str) -> Cell:
    return lambda row: f"{row[part]['gib']:.2f}" if "gib" in row.get(part, {}) else None


def _scaled(key: str, unit: float, form: str) -> Cell:
    return lambda row: f"{row[key] / unit:{form}}" if key in row else None


def _errors(result: dict[str, Any]) -> list[list[str]]:
    lines = _by_length(
        result, "relative error, Gaussian", lambda row: f"{row['error']:.2g}" if "error" in row else None
    )
    model = result["model"]
    lines[0].append(f"heads of the model, {_short(model['tokens'])}")
    lines[1].append("---:")
    for cells in lines[2:]:
        errors = model["errors"].get(cells[0])
        cells.append(
            "" if errors is None else " to ".join(dict.fromkeys(f"{e:.2g}" for e in (min(errors), max(errors))))
        )
    return lines


def _recall(result: dict[str, Any]) -> list[list[str]]:
    found = {(row["method"], row["tokens"]): row for row in result["recall"]}
    lengths = sorted({row["tokens"] for row in result["recall"]})
    lines = [["answered right in the embedded model", *map(_short, lengths)], ["---", *["---:"] * len(lengths)]]
    for name in dict.fromkeys(row["method"] for row in result["recall"]):
        cells = (found[name, length] for length in lengths)
        lines.append([name, *(f"{row['right']} of {row['prompts']}" for row in cells)])
    return lines


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def _caption(result: dict[str, Any]) -> str:
    where, shape = result["environment"], result["shape"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version[0].isdigit())
    what = f"one sequence, {shape['heads']} heads of {shape['head_dim']} channels, {shape['dtype']}"
    return f"{what}; {where['device']}; {versions}; {where['date']}."


def draw(result: dict[str, Any], path: Path) -> None:
    """Times, memory and errors against length, on logarithmic axes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels: list[tuple[str, Callable[[dict[str, Any]], float | None]]] = [
        *((f"{title} (ms)", lambda row, part=part: row.get(part, {}).get("ms")) for part, title in PARTS.items()),
        ("peak of memory, forward and backward (GiB)", lambda row: row.get("both", {}).get("gib")),
        ("relative error on Gaussian inputs", lambda row: row.get("error")),
    ]
    panels = [panel for panel in panels if any(panel[1](row) is not None for row in result["rows"])]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.4 * len(panels), 5), squeeze=False, layout="constrained")
    styles = ["-", "--", ":"]
    for axis, (title, value) in zip(axes.flat, panels, strict=True):
        for i, method in enumerate(result["methods"]):
            rows = [row for row in result["rows"] if row["method"] == method["name"] and value(row) is not None]
            points = [row["tokens"] for row in rows], [value(row) for row in rows]
            axis.plot(
                *points,
                marker=".",
                linestyle=styles[i // 10],
                color=f"C{i % 10}",
                label=method["name"] if rows else None,
            )
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:g}K")
        axis.set_xlabel("tokens")
        axis.grid(visible=True, which="both", alpha=0.25)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=6)
    figure.suptitle(f"{result['environment']['device']}; {result['environment']['date']}", fontsize=9, color="gray")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
