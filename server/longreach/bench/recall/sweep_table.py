"""A result of the suite `ruler-like` as a Markdown table, and which setting of each policy it speaks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from longreach.bench.policy_sweep import DENSE

ENOUGH = 0.95  # of the answers that dense attention gets right
BUDGETS = "budget for answers"

Row = dict[str, Any]


def series(row: Row) -> str:
    """What a setting is compared within: its policy, or the budgets for answers, which are about another cost."""
    return BUDGETS if row["keys_read"] is not None else row["setting"].split()[0]


def computed(row: Row) -> float:
    """The share of keys that answers read under a budget, or of pairs that the prompt was computed with."""
    return next((row[name] for name in ("keys_read", "density") if row[name] is not None), 1.0)


def right(row: Row, dense: Row | None = None) -> tuple[int, int]:
    """How many answers are right, and of how many, on the tasks that both rows have."""
    tasks = [task for task in row["tasks"] if dense is None or task in dense["tasks"]]
    answers = [answer for task in tasks for answer in row["tasks"][task]]
    return sum(answers), len(answers)


def dense_of(result: dict[str, Any], length: int) -> Row:
    """Dense attention's row at a length, of the tasks that it can do."""
    row = next(row for row in result["curves"] if row["setting"] == DENSE and row["tokens"] == length)
    unable = result["unable"].get(length) or result["unable"].get(str(length)) or []  # JSON has texts for keys
    return row | {"tasks": {task: answers for task, answers in row["tasks"].items() if task not in unable}}


def lengths_of(result: dict[str, Any]) -> list[int]:
    """The lengths at which something was measured."""
    return sorted({row["tokens"] for row in result["curves"]})


def picks(result: dict[str, Any]) -> dict[str, str]:
    """For each series but dense the setting to prefer, over all lengths together: of those that keep `ENOUGH` of what
    dense attention answers on the same prompts, the one that computes least; if none does, the one with the most of
    them. A setting that is not asked at a length, since it would be dense attention there, is judged by the others."""
    settings: dict[str, list[Row]] = {}
    for row in result["curves"]:
        if row["setting"] != DENSE and _asked(row):
            settings.setdefault(row["setting"], []).append(row)
    series_of: dict[str, list[tuple[str, float, float]]] = {}
    for name, rows in settings.items():
        mine = sum(right(row)[0] for row in rows)
        dense = sum(right(dense_of(result, row["tokens"]))[0] for row in rows)
        cost = sum(map(computed, rows)) / len(rows)
        series_of.setdefault(series(rows[0]), []).append((name, mine / max(1, dense), cost))
    picked = {}
    for policy, candidates in series_of.items():
        good = [candidate for candidate in candidates if candidate[1] >= ENOUGH]
        best = min(good, key=lambda c: c[2]) if good else max(candidates, key=lambda c: (c[1], -c[2]))
        picked[policy] = best[0]
    return picked


def _asked(row: Row) -> bool:
    return any(row["tasks"].values())


def table(result: dict[str, Any]) -> str:
    """A row for each setting: for each length the right answers and density (or what answers read); over all lengths
    what was lost and gained against dense attention, the mass kept, and TTFT as a share of dense attention's. The
    picked setting of each policy is in bold."""
    lengths = lengths_of(result)
    found = {(row["setting"], row["tokens"]): row for row in result["curves"]}
    bold = set(picks(result).values())
    head = ["setting", *(f"{length:,}" for length in lengths), "lost / gained (p)", "kept: mean, min", "TTFT of dense"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for setting in dict.fromkeys(row["setting"] for row in result["curves"]):
        rows = {length: found[setting, length] for length in lengths if (setting, length) in found}
        if setting == DENSE:
            rows = {length: dense_of(result, length) for length in rows}
        cells = [_answers(rows[length]) if length in rows else "" for length in lengths]
        name = f"**{setting}**" if setting in bold else setting
        lines.append([name, *cells, _difference(rows.values()), _kept(rows.values()), _times(rows.values())])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption(result)}\n"


def _answers(row: Row) -> str:
    found, of = right(row)
    cost = "" if row["setting"] == DENSE else f" at {computed(row):.2f}"
    return f"{found} of {of}{cost}" if of else ""


def _difference(rows: Iterable[Row]) -> str:
    from longreach.bench.recall.paired import probability

    told = [row for row in rows if "lost" in row]
    if not told:
        return ""
    lost, gained = sum(row["lost"] for row in told), sum(row["gained"] for row in told)
    return f"{lost} / {gained} ({probability(lost, gained):.2g})"


def _kept(rows: Iterable[Row]) -> str:
    told = [row for row in rows if row["kept"] is not None]
    if not told:
        return ""
    return f"{sum(row['kept'] for row in told) / len(told):.3f}, {min(row['kept_min'] for row in told):.3f}"


def _times(rows: Iterable[Row]) -> str:
    told = [row["ttft_of_dense"] for row in rows if row.get("ttft_of_dense") is not None]
    return f"{told[-1]:.2f}" if told else ""  # of the longest


def caption(result: dict[str, Any]) -> str:
    """What was asked, of which model, where."""
    plan = result["plan"]
    said = [f"{result['model']['name']}; {plan['count']} prompts of a task and length"]
    left = [f"{', '.join(tasks)} at {int(length):,}" for length, tasks in result["unable"].items() if tasks]
    if left:
        said.append(f"tasks that dense attention cannot do, left out: {'; '.join(left)}")
    said += [f"{name} was refused" for name in result["refused"]]
    where = result["environment"]
    versions = (f"{name} {version}" for name, version in where["versions"].items() if version[0].isdigit())
    return "; ".join([*said, where["device"], ", ".join(versions), where["date"]]) + "."
