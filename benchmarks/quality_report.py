"""The result of `quality.py` as a Markdown table and a picture, and which setting of each policy it speaks for."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

ENOUGH = 0.95  # of the answers that dense attention gets right


NAMED = 5  # settings that were not run for lack of time are named if there are no more
_MANY = 25  # prompts of each task, from which on answers are told by task


def compared(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of lengths at which something was measured beside dense attention before time was over; all if nothing
    else was measured at any."""
    beside = {row["tokens"] for row in result["curves"] if row["setting"] != "dense"}
    return [row for row in result["curves"] if not beside or row["tokens"] in beside]


def series(row: dict[str, Any]) -> str:
    """What a setting is compared within: its policy, or the budgets for answers, which are about another cost."""
    return "budget for answers" if row.get("keys_read") is not None else row["setting"].split()[0]


def table(result: dict[str, Any]) -> str:
    """A row for each setting, a group of columns for each length; the picked setting of each policy is in bold. Of many
    prompts at one length, a row for each task.

    Where all settings are decode budgets, nothing is picked and no times are told: they are those of reading the
    prompt, on which a budget has no influence.
    """
    curves = compared(result)
    if is_by_task(result):
        return f"{_by_task(*curves)}\n\n{_about(result)}\n"
    lengths = sorted({row["tokens"] for row in curves})
    found = {(row["setting"], row["tokens"]): row for row in curves}
    only_budgets = is_of_budgets(result)
    bold = set() if only_budgets else set(picks(result).values())
    head = ["setting"]
    for n in lengths:
        head += _told(
            [f"{n:,}: right", "lost / gained (p)", "TTFT (s)", "speed-up", "density", "answer reads"], only_budgets
        )
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for setting in dict.fromkeys(row["setting"] for row in curves):
        cells = [f"**{setting}**" if setting in bold else setting]
        for n in lengths:
            cells += _told(_cells(found.get((setting, n)), found["dense", n]), only_budgets)
        lines.append(cells)
    return f"{_rows(lines)}\n\n{_about(result)}\n"


def _rows(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _by_task(dense: dict[str, Any], *others: dict[str, Any]) -> str:
    """Answers of some settings beside those of dense attention, by task."""
    head = ["task", "dense"]
    for row in others:
        head += [row["setting"], "lost / gained"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    tasks = dense["tasks"]
    for task in [*dict.fromkeys(tasks), None]:
        of_task = [i for i, name in enumerate(tasks) if task in (name, None)]
        cells = [task or f"all {len(of_task):,}", str(sum(dense["right"][i] for i in of_task))]
        for row in others:
            pairs = [(dense["right"][i], row["right"][i]) for i in of_task]
            lost, gained = pairs.count((True, False)), pairs.count((False, True))
            cells += [str(sum(right for _, right in pairs)), f"{lost} / {gained}"]
        lines.append(cells)
    seconds = ["time to the first token", f"{dense['ttft_s']:.3f} s"]
    for row in others:
        seconds += [f"{row['ttft_s']:.3f} s", ""]
    return _rows([*lines, seconds])


def _about(result: dict[str, Any]) -> str:
    """What was run where."""
    plan = result["plan"]
    late = result["late"]
    missed = ", ".join(late) if len(late) <= NAMED else f"{len(late)} settings, among them {late[0]}"
    said = [
        f"{plan['count']} prompts of each of {len(plan['tasks'])} tasks; the embedded model",
        *([f"not run for lack of time: {missed}"] if late else []),
        _where(result["environment"]),
        f"weights {result['weights']}",
        *([f"times: {_where(result['times'])}; weights {result['times']['weights']}"] if "times" in result else []),
    ]
    return f"{'; '.join(said)}."


def _where(environment: dict[str, Any]) -> str:
    """Device, versions and date as text."""
    versions = (f"{name} {version}" for name, version in environment["versions"].items() if version[0].isdigit())
    return "; ".join((environment["device"], ", ".join(versions), environment["date"]))


def is_by_task(result: dict[str, Any]) -> bool:
    """Whether there are enough prompts, all of one length, to tell what is lost on each task; not of budgets."""
    at_one_length = len({row["tokens"] for row in result["curves"]}) == 1
    return at_one_length and result["plan"]["count"] >= _MANY and not is_of_budgets(result)


def is_of_budgets(result: dict[str, Any]) -> bool:
    """Whether all settings but dense attention are decode budgets."""
    rows = [row for row in result["curves"] if row["setting"] != "dense"]
    return bool(rows) and all(row.get("keys_read") is not None for row in rows)


def _told(cells: list[str], only_budgets: bool) -> list[str]:
    return [*cells[:2], cells[-1]] if only_budgets else cells


def _cells(row: dict[str, Any] | None, dense: dict[str, Any]) -> list[str]:
    if row is None:
        return [""] * 6
    difference = "" if row is dense else f"{row['lost']} / {row['gained']} ({row['p']:.2g})"
    speed = f"{dense['ttft_s'] / row['ttft_s']:.2f}"
    cost = "" if row["density"] is None else f"{row['density']:.3f}"
    read = "" if row.get("keys_read") is None else f"{row['keys_read']:.3f}"
    return [f"{sum(row['right'])} of {len(row['right'])}", difference, f"{row['ttft_s']:.3f}", speed, cost, read]


def picks(result: dict[str, Any]) -> dict[str, str]:
    """For each series but dense the setting to prefer, over all lengths together: of those that keep `ENOUGH` of the
    answers that dense attention gets right, the one that computes the fewest pairs, or reads the fewest keys for
    answers; if none does, the one with the most answers. Only settings that were run at every length count.

    Times do not pick: a small model's are mostly not of attention, and differ by more from run to run.
    """
    curves = compared(result)
    lengths = {row["tokens"] for row in curves}
    settings: dict[str, list[dict[str, Any]]] = {}
    for row in curves:
        settings.setdefault(row["setting"], []).append(row)
    enough = ENOUGH * sum(sum(row["right"]) for row in settings["dense"])
    whole: dict[str, list[tuple[str, int, float]]] = {}
    for name, rows in settings.items():
        if name != "dense" and {row["tokens"] for row in rows} == lengths:
            right, cost = sum(sum(row["right"]) for row in rows), sum(_computed(row) for row in rows)
            whole.setdefault(series(rows[0]), []).append((name, right, cost))
    picked = {}
    for policy, candidates in whole.items():
        good = [candidate for candidate in candidates if candidate[1] >= enough]
        best = min(good, key=lambda c: c[2]) if good else max(candidates, key=lambda c: (c[1], -c[2]))
        picked[policy] = best[0]
    return picked


def draw(result: dict[str, Any], path: Path) -> None:
    """Share of right answers against the speed-up of TTFT and against density, or under a budget what answers read: a
    column for each length, a line for each policy; picked settings have a ring."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    curves = compared(result)
    lengths = sorted({row["tokens"] for row in curves})
    picked = set(picks(result).values())
    figure, axes = pyplot.subplots(2, len(lengths), figsize=(5 * len(lengths), 7), squeeze=False, layout="constrained")
    policies = list(dict.fromkeys(series(row) for row in curves))
    for column, length in enumerate(lengths):
        rows = [row for row in curves if row["tokens"] == length]
        dense = next(row for row in rows if row["setting"] == "dense")
        for i, policy in enumerate(policies):
            points = [
                (dense["ttft_s"] / row["ttft_s"], _computed(row), _share(row), row)
                for row in rows
                if series(row) == policy
            ]
            of_prompt = [] if policy == "budget for answers" else [(axes[0, column], 0)]
            for axis, x in (*of_prompt, (axes[1, column], 1)):
                line = sorted(points, key=itemgetter(x))
                axis.plot(
                    [p[x] for p in line], [p[2] for p in line], marker=".", color=f"C{i}", label=policy, alpha=0.8
                )
                ring = [point for point in line if point[3]["setting"] in picked]
                axis.plot([p[x] for p in ring], [p[2] for p in ring], "o", mfc="none", ms=11, color=f"C{i}")
        for axis, name in (
            (axes[0, column], "speed-up of TTFT over dense"),
            (axes[1, column], "density, or what answers read"),
        ):
            axis.set_title(f"{length:,} tokens", fontsize=10)
            axis.set_xlabel(name)
            axis.set_ylabel("answered right")
            axis.set_ylim(-0.03, 1.03)
            axis.grid(visible=True, alpha=0.25)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    where, timed = result["environment"], result.get("times")
    title = f"{where['device']}; {where['date']}" + (f"; times: {timed['device']}; {timed['date']}" if timed else "")
    figure.suptitle(title, fontsize=9, color="gray")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _computed(row: dict[str, Any]) -> float:
    """The share of keys that answers read under a budget, or of pairs that the prompt was computed with."""
    return next((row[name] for name in ("keys_read", "density") if row.get(name) is not None), 1.0)


def _share(row: dict[str, Any]) -> float:
    return sum(row["right"]) / len(row["right"])
