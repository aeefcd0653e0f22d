"""The suite `ruler-like`: every attention policy on the same prompts, beside dense attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from longreach.bench.policy_sweep import DENSE, Policy
from longreach.bench.recall.client import Answer, RefusedError, Server
from longreach.bench.recall.haystacks import HAYSTACKS
from longreach.bench.recall.paired import beside
from longreach.bench.recall.ruler import SHORTEST, TASKS, Completion, completions
from longreach.bench.recall.settings import worth_asking
from longreach.bench.recall.suite import Plan
from longreach.bench.recall.tokens import Count

ABLE = 0.5  # of a task's prompts, that dense attention has to answer for the task to tell anything of policies
_TIMED_SEED = 1_000_003
_EXAMPLES = 2

Save = Callable[[dict[str, Any]], object]
Report = Callable[[str], object]


@dataclass(frozen=True)
class SweepPlan:
    """What to ask of each setting: `count` prompts of each task and length, and `repeats` others that are timed alone.

    Raises:
        ValueError: an unknown task or haystack, or a number that is too small.
    """

    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    count: int = 10
    repeats: int = 3
    seed: int = 7
    haystacks: tuple[str, ...] = HAYSTACKS

    def __post_init__(self) -> None:
        Plan.check("tasks", self.tasks, TASKS)
        Plan.check("--haystacks", self.haystacks, HAYSTACKS)
        if not self.tasks or not self.haystacks or not self.lengths or min(self.lengths) < SHORTEST:
            raise ValueError(f"lengths: name one or more, each of {SHORTEST} tokens or more")
        if self.count < 1 or self.repeats < 0:
            raise ValueError("--count must be 1 or more, and --repeats 0 or more")


def sweep(
    server: Callable[[Any], Server],
    policies: Sequence[Policy],
    count: Count,
    plan: SweepPlan,
    *,
    concurrency: int = 1,
    report: Report = print,
    save: Save | None = None,
) -> dict[str, Any]:
    """Ask every prompt under every policy; `server` makes a client whose requests carry an attention policy.

    Dense attention comes first. Tasks of which it answers less than `ABLE` at a length are not asked of the others
    there, and are named under ``unable``. A setting that the server refuses is named under ``refused``. Lengths beyond
    the server's are left out, and named under ``too_long``.

    Returns:
        What goes to JSON: the plan, and ``curves``: a row for each length and setting, see `_row`. `save` is given it
        after each row.

    Raises:
        ValueError: a prompt cannot be made, or the server went away, or takes none of the lengths.
    """
    if concurrency < 1:
        raise ValueError("concurrency must be 1 or more")
    first = server(policies[0].attention)
    most = first.max_model_len
    lengths = [length for length in plan.lengths if most is None or length <= most]
    if not lengths:
        raise ValueError(f"--lengths: the server takes {most} tokens; give a length that it takes")
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "suite": "ruler-like",
        "plan": asdict(plan),
        "too_long": [length for length in plan.lengths if length not in lengths],
        "unable": {},
        "refused": {},
        "curves": rows,
    }
    with ThreadPoolExecutor(concurrency) as pool:
        for length in lengths:
            drawn = pool.map(lambda task, n=length: _prompts(count, plan, task, n, plan.count), plan.tasks)
            asked = [prompt for prompts in drawn for prompt in prompts]
            timed = _prompts(count, plan, TASKS[0], length, plan.repeats, plan.seed + _TIMED_SEED)
            dense: dict[str, Any] | None = None
            for policy in policies:
                if not worth_asking(policy, length) or policy.name in result["refused"]:
                    continue
                client = server(policy.attention)
                try:
                    answers = list(pool.map(lambda p, c=client: c.answer(p.text, p.max_tokens), asked))
                    alone = [client.answer(prompt.text, 1) for prompt in timed]
                except RefusedError as error:
                    if dense is None:
                        raise
                    result["refused"][policy.name] = str(error)
                    report(f"{length:>7,} {policy.name}: {error}")
                    continue
                row = _row(policy, length, asked, answers, alone)
                if dense is None:
                    able = _able(row["tasks"])
                    result["unable"][length] = [task for task in plan.tasks if task not in able]
                    row["examples"] = _wrong(asked, answers)
                    asked = [prompt for prompt in asked if prompt.task in able]
                    dense = row
                else:
                    row |= _compared(row, dense)
                rows.append(row)
                report(line(row, result["unable"][length]))
                if save is not None:
                    save(result)
    return result


def _prompts(
    count: Count, plan: SweepPlan, task: str, length: int, number: int, seed: int | None = None
) -> list[Completion]:
    seed = plan.seed if seed is None else seed
    return list(completions(count, task, length, number, seed=seed, haystacks=plan.haystacks))


def _able(tasks: dict[str, list[bool]]) -> list[str]:
    """The tasks that dense attention can do."""
    return [task for task, right in tasks.items() if sum(right) >= ABLE * len(right)]


def _row(
    policy: Policy, length: int, asked: Sequence[Completion], answers: Sequence[Answer], alone: Sequence[Answer]
) -> dict[str, Any]:
    """A setting at one length: which prompts of each task were answered right; the mean over prompts of density and
    kept mass, the least kept mass of any, and the share of keys that answers read; the median TTFT, in seconds."""
    tasks: dict[str, list[bool]] = {}
    for prompt, answer in zip(asked, answers, strict=True):
        tasks.setdefault(prompt.task, []).append(prompt.right(answer.text))
    keys = sum(answer.keys for answer in answers)
    least = [answer.kept_min for answer in answers if answer.kept_min is not None]
    return {
        "setting": policy.name,
        "attention": policy.attention,
        "tokens": length,
        "tasks": tasks,
        "prompt_tokens": round(statistics.mean(answer.prompt_tokens for answer in answers)) if answers else None,
        "density": _mean(answer.density for answer in answers),
        "kept": _mean(answer.kept for answer in answers),
        "kept_min": min(least) if least else None,
        "keys_read": round(sum(answer.keys_read for answer in answers) / keys, 4) if keys else None,
        "answer_kept": _mean(answer.answer_kept for answer in answers),
        "ttft_s": round(statistics.median(answer.ttft_s for answer in alone), 4) if alone else None,
    }


def _mean(values: Iterator[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return round(statistics.mean(found), 4) if found else None


def _compared(row: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """What is said of a setting beside dense attention, on the tasks of the setting's row."""
    right = [answer for answers in row["tasks"].values() for answer in answers]
    his = [answer for task in row["tasks"] for answer in dense["tasks"][task]]
    times = (row["ttft_s"], dense["ttft_s"])
    return beside(right, his) | {"ttft_of_dense": round(times[0] / times[1], 3) if all(times) else None}


def _wrong(asked: Sequence[Completion], answers: Sequence[Answer]) -> list[dict[str, str]]:
    """Some answers of dense attention that were not right, of each task."""
    examples: list[dict[str, str]] = []
    for prompt, answer in zip(asked, answers, strict=True):
        seen = sum(example["task"] == prompt.task for example in examples)
        if seen < _EXAMPLES and not prompt.right(answer.text):
            said = {"ending": prompt.text[-160:], "expected": prompt.answer, "got": answer.text}
            examples.append({"task": prompt.task, **said})
    return examples


def line(row: dict[str, Any], unable: Sequence[str] = ()) -> str:
    """One row as text."""
    by_task = ", ".join(f"{task} {sum(right)}" for task, right in row["tasks"].items())
    right = [answer for answers in row["tasks"].values() for answer in answers]
    parts = [f"{sum(right)} of {len(right)} right ({by_task})"]
    for name, key in (("density", "density"), ("kept", "kept"), ("answers read", "keys_read")):
        if row[key] is not None:
            parts.append(f"{name} {row[key]:.3f}")
    if row["ttft_s"] is not None:
        parts.append(f"TTFT {row['ttft_s']:.3f} s")
    if row["setting"] == DENSE and unable:
        parts.append(f"not asked of others: {', '.join(unable)}")
    return f"{row['tokens']:>7,} {row['setting']}: {', '.join(parts)}"
