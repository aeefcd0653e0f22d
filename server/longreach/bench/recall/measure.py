"""`longreach bench recall`: recall by task, length and depth, beside density and time to first token."""

from __future__ import annotations

import datetime
import importlib.metadata
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from longreach.bench.recall.client import Answer, Server
from longreach.bench.recall.sampler import Prompt
from longreach.bench.recall.suite import Plan, depths_of

Report = Callable[[str], object]
Draw = Callable[[str, int], Iterable[Prompt]]

_EXAMPLES = 3  # wrong answers kept for each task and length
_MANY = 1000  # prompts a cell, from which on a table has three digits


def measure(server: Server, plan: Plan, draw: Draw, concurrency: int = 1, report: Report = print) -> dict[str, Any]:
    """Ask every prompt of the plan, `concurrency` at a time; `draw` makes the prompts of a task and a length.

    Returns what goes to JSON: the plan, and a row for each task and length with the share answered exactly, that share
    by depth, the share of false alarms, median seconds to the first token, and mean density where it is reported.

    Raises:
        ValueError: a prompt cannot be made, or the server refused it.
    """
    if concurrency < 1:
        raise ValueError("concurrency must be 1 or more")
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(concurrency) as pool:
        for length in plan.lengths:
            for task in plan.tasks:
                asked = list(draw(task, length))
                answers = list(pool.map(lambda prompt: server.answer(prompt.text, prompt.max_tokens), asked))
                rows.append(row(plan, asked, answers))
                report(line(rows[-1]))
    return {
        "environment": {
            "model": server.model,
            "longreach": importlib.metadata.version("longreach"),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
        "plan": asdict(plan),
        "rows": rows,
    }


def row(plan: Plan, asked: Sequence[Prompt], answers: Sequence[Answer]) -> dict[str, Any]:
    """One task at one length."""
    right = [prompt.right(answer.text) for prompt, answer in zip(asked, answers, strict=True)]
    wrong = [
        {"question": prompt.text[-200:], "expected": prompt.answer, "got": answer.text}
        for prompt, answer, r in zip(asked, answers, right, strict=True)
        if not r
    ]
    densities = [answer.density for answer in answers if answer.density is not None]
    return {
        "task": asked[0].task,
        "length": asked[0].length,
        **shares(plan, right, [p.false_alarm(a.text) for p, a in zip(asked, answers, strict=True)]),
        "ttft_s": round(statistics.median(answer.ttft_s for answer in answers), 4),
        "prompt_tokens": round(statistics.mean(answer.prompt_tokens for answer in answers)),
        "density": round(statistics.mean(densities), 4) if densities else None,
        "wrong": wrong[:_EXAMPLES],
    }


def shares(plan: Plan, right: Sequence[bool], alarms: Sequence[bool]) -> dict[str, Any]:
    """What was right of a task's prompts at one length, in the order of the plan: in all and by depth."""
    depths = depths_of(plan)
    return {
        "prompts": len(right),
        "exact": _share(right),
        "by_depth": {f"{depth:g}": _share(right[i :: len(depths)]) for i, depth in enumerate(depths[: len(right)])},
        "false_alarms": _share(alarms),
    }


def _share(flags: Sequence[bool]) -> float:
    return round(sum(flags) / len(flags), 4)


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    time = f", TTFT {row['ttft_s']:.3f} s" if "ttft_s" in row else ""
    density = f", density {row['density']:.3f}" if row.get("density") is not None else ""
    return (
        f"{row['task']:<10} {row['length']:>7,} tokens: {row['exact']:.2f} of {row['prompts']} exact, "
        f"false alarms {row['false_alarms']:.2f}{time}{density}"
    )


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table: a row for each task, a column for each length, then TTFT and density. As many
    digits as the prompts of a cell speak for."""
    lengths = result["plan"]["lengths"]
    digits = 3 if result["plan"]["count"] >= _MANY else 2
    found = {(row["task"], row["length"]): row for row in result["rows"]}
    lines = [["task", *(f"{length:,}" for length in lengths)], ["---", *["---:"] * len(lengths)]]
    for task in result["plan"]["tasks"]:
        exact = (found[task, length]["exact"] if (task, length) in found else None for length in lengths)
        lines.append([task, *("" if share is None else f"{share:.{digits}f}" for share in exact)])

    def mean(name: str, length: int) -> str:
        values = [row[name] for (_, at), row in found.items() if at == length and row.get(name) is not None]
        return f"{statistics.mean(values):.3f}" if values else "not reported"

    lines.append(["false alarms", *(mean("false_alarms", length) for length in lengths)])
    if any("ttft_s" in row for row in result["rows"]):
        lines.append(["TTFT (s)", *(mean("ttft_s", length) for length in lengths)])
        lines.append(["density", *(mean("density", length) for length in lengths)])
    plan = result["plan"]
    plain = ("model", "on", "date")  # which need no name beside them
    where = ", ".join(v if name in plain else f"{name} {v}" for name, v in result["environment"].items())
    grammar = f"{plan['phrasing']} phrasings, {plan['filler']} text, " if "phrasing" in plan else ""
    caption = f"Exact match, {plan['count']} prompts a cell, {grammar}seed {plan['seed']}; {where}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"
