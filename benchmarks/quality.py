"""Recall against speed for every attention policy and budget, of the embedded model, through the server.

    python -m benchmarks.quality --lengths 16384,32768 --out result.json
    python -m benchmarks.quality --share 0/3 --out part0.json   # every third setting; 1/3 and 2/3 at the same time
    python -m benchmarks.quality --join part0.json part1.json part2.json --out result.json
    python -m benchmarks.quality --join result.json --times alone.json --out result.json

A setting is a policy with its parameters. Each one answers the same prompts, of all tasks of `training.recall`,
several at a time; then other prompts one at a time, for the time to the first token. No prompt comes twice under a
setting, so the prefix cache answers nothing. Where several shared the settings of one machine, its times say little:
``--times`` takes those of a run that had a machine to itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from longreach.bench.launch import served
from longreach.bench.policy_sweep import Policy, chosen
from longreach.bench.recall.client import Server
from longreach.bench.recall.paired import beside
from longreach.bench.sizes import whole_numbers
from longreach.bench.summary import environment
from longreach.config import EMBEDDED_MODEL

from benchmarks.quality_report import table
from training.recall.codec import Codec
from training.recall.suite import Plan, Prompt, prompts, sampler_of, some_tasks

TIMED_TASK = "many"  # whose prompts are timed; what is asked for does not matter
_OTHER_SEED = 1_000_003
SHARED_MEMORY = "4GiB"  # for keys and values of a server beside others; eight prompts of 32,768 tokens need a third


def setting(policy: str, **parameters: object) -> str:
    """A policy with parameters as the command line of `longreach bench load` takes it."""
    return json.dumps({"policy": policy, **parameters})


SETTINGS = (
    "dense",
    *(setting("dynamic", estimator="moments", recall=recall) for recall in (0.8, 0.9, 0.95, 0.98)),
    *(setting("dynamic", estimator="antidiagonal", recall=recall) for recall in (0.8, 0.9, 0.95, 0.98)),
    *(setting("dynamic", estimator="pooled", recall=recall) for recall in (0.8, 0.95)),
    *(setting("dynamic", estimator="moments", density=density) for density in (0.1, 0.3)),
    *(setting("dynamic", recall=1, decode_budget=budget) for budget in (64, 128, 256, 512, 1024, 2048)),
    *(setting("window", size=size) for size in (1024, 4096, 8192)),
    *(setting("strided", stride=stride) for stride in (512, 1024, 2048, 4096)),
    *(setting("bigbird", window=window, random_blocks=n) for window, n in ((1024, 8), (2048, 16), (4096, 32))),
    *(setting("local_global", window=window) for window in (1024, 4096, 8192)),
    *(setting("a_shape", window=window) for window in (1024, 4096, 8192)),
    *(setting("vertical_slash", slashes=[128 * i for i in range(count)]) for count in (16, 64)),
)


def label(policy: Policy) -> str:
    """What tables call a setting: the policy's name, and its parameters; of a long list only how many and the last."""
    if not isinstance(policy.attention, dict):
        return policy.name
    parts = [policy.name.split()[0]]
    for name, value in policy.attention.items():
        if isinstance(value, list) and len(value) > 2:
            value = f"({len(value)} up to {value[-1]})"
        if name != "policy":
            parts.append(f"{name} {value}")
    return " ".join(parts)


def weights() -> str:
    """What tells the embedded model's weights from others."""
    return hashlib.sha256((EMBEDDED_MODEL / "model.safetensors").read_bytes()).hexdigest()[:12]


def share(text: str) -> tuple[int, int]:
    """The two numbers of --share.

    Raises:
        ValueError: it is not `I/N` with I from 0 to N - 1.
    """
    first, _, of = text.partition("/")
    if not (first.isdecimal() and of.isdecimal() and int(first) < int(of)):
        raise ValueError(f"--share must be I/N with I from 0 to N - 1; got {text!r}")
    return int(first), int(of)


def measured(url: str, policy: Policy, asked: list[Prompt], timed: list[Prompt], at_once: int) -> dict[str, Any]:
    """A setting's answers to the prompts of one length, and its time to the first token over others.

    Raises:
        ValueError: the server refused a prompt or the policy.
    """
    server = Server(url, policy.attention)
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda prompt: server.answer(prompt.text, prompt.max_tokens), asked))
    alone = [server.answer(prompt.text, 1) for prompt in timed]
    right = [prompt.right(answer.text) for prompt, answer in zip(asked, answers, strict=True)]
    densities = [answer.density for answer in [*answers, *alone] if answer.density is not None]
    keys = sum(answer.keys for answer in answers)
    return {
        "setting": label(policy),
        "attention": policy.attention,
        "tokens": asked[0].length,
        "right": right,
        "tasks": [prompt.task for prompt in asked],
        "ttft_s": statistics.median(answer.ttft_s for answer in alone),
        "density": statistics.mean(densities) if densities else None,
        "keys_read": sum(answer.keys_read for answer in answers) / keys if keys else None,
    }


def run(
    url: str, texts: Sequence[str], part: slice, plan: Plan, repeats: int, at_once: int, deadline: float, save: Any
) -> dict[str, Any]:
    """Measure `part` of the settings, of which dense attention is the first, at each length of the plan; `save` is
    given the result after each one.

    Settings that would begin after the deadline are not run, and are named under ``late``. Where dense attention is not
    in the part, rows are without what `beside` says of them.

    Raises:
        ValueError: the server has no such policy, or refused a prompt.
    """
    policies = chosen(url, texts)[part]
    sampler = sampler_of(Codec.load(EMBEDDED_MODEL), plan)
    rows: list[dict[str, Any]] = []
    late: list[str] = []
    result = {"environment": environment(), "weights": weights(), "plan": asdict(plan), "curves": rows, "late": late}
    for length in plan.lengths:
        asked = [prompt for task in plan.tasks for prompt in prompts(sampler, plan, task, length)]
        other = replace(plan, tasks=(TIMED_TASK,), count=repeats, seed=plan.seed + _OTHER_SEED)
        timed = list(prompts(sampler, other, TIMED_TASK, length))
        dense = None
        for policy in policies:
            if policy is not policies[0] and time.monotonic() > deadline:
                late.append(f"{label(policy)} at {length:,} tokens")
                continue
            row = measured(url, policy, asked, timed, at_once)
            if row["setting"] == "dense":
                dense = row["right"]
            rows.append(row if dense is None else row | beside(row["right"], dense))
            print(line(rows[-1]), file=sys.stderr, flush=True)
            save(result)
    return result


def joined(results: Sequence[dict[str, Any]], settings: Sequence[str] = SETTINGS) -> dict[str, Any]:
    """One result of several that shared the settings of one plan, from one day or several: the first one's dense
    attention is kept and compared with, the last day is told, and which of `settings` none of them ran is named under
    ``late``.

    Raises:
        ValueError: the results are of different plans, weights or places, or their dense answers differ, or there are
            none.
    """
    first = results[0]
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for result in results:
        if any(result[part] != first[part] for part in ("plan", "weights")) or _place(result) != _place(first):
            raise ValueError(
                "--join: the results differ in plan, weights or environment: join those of one kind of run"
            )
        for row in result["curves"]:
            kept = rows.setdefault((row["tokens"], row["setting"]), row)
            if row["setting"] == "dense" and row["right"] != kept["right"]:
                raise ValueError("--join: dense answers differ: the results are not of the same prompts")
    lengths = first["plan"]["lengths"]
    if missing := [n for n in lengths if (n, "dense") not in rows]:
        raise ValueError(f"--join: no result has dense attention at {missing[0]:,} tokens: add the one of --share 0/N")
    parsed = [{"policy": text} if text == "dense" else json.loads(text) for text in settings]
    order = [(n, label(Policy(p["policy"], p))) for n in lengths for p in parsed]
    late = [f"{name} at {n:,} tokens" for n, name in order if (n, name) not in rows]
    places = {cell: place for place, cell in enumerate(order)}
    ordered = sorted(rows.values(), key=lambda row: places.get((row["tokens"], row["setting"]), len(places)))
    curves = [row | beside(row["right"], rows[row["tokens"], "dense"]["right"]) for row in ordered]
    day = {"date": max(result["environment"]["date"] for result in results)}
    return first | {"environment": first["environment"] | day, "curves": curves, "late": late}


def _place(result: dict[str, Any]) -> dict[str, Any]:
    """The environment without its date."""
    return {name: value for name, value in result["environment"].items() if name != "date"}


def with_times(result: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """The result with the times of ``alone``, whose environment and weights it has as ``times`` then: other weights of
    the same shape take as long, but for what little more or less ``dynamic`` chooses.

    Raises:
        ValueError: ``alone`` lacks a setting at some length.
    """
    seconds = {(row["tokens"], row["setting"]): row["ttft_s"] for row in alone["curves"]}
    for row in result["curves"]:
        if (row["tokens"], row["setting"]) not in seconds:
            raise ValueError(f"--times: lacks {row['setting']} at {row['tokens']:,} tokens: run it with all settings")
    curves = [row | {"ttft_s": seconds[row["tokens"], row["setting"]]} for row in result["curves"]]
    times = alone.get("times", alone["environment"] | {"weights": alone["weights"]})
    return result | {"curves": curves, "times": times}


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    density = "" if row["density"] is None else f", density {row['density']:.3f}"
    if row["keys_read"] is not None:
        density += f", answers read {row['keys_read']:.3f}"
    right = f"{sum(row['right'])} of {len(row['right'])} right"
    return f"{row['tokens']:>7,} {row['setting']}: {right}, TTFT {row['ttft_s']:.3f} s{density}"


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--url", help="a server of the embedded model with --page-bounds; one is started otherwise")
    parser.add_argument("--lengths", default="16384,32768", help="tokens of the prompts")
    parser.add_argument("--attention", action="append", help="a setting, as of `longreach bench load`; may be repeated")
    parser.add_argument("--tasks", help="tasks of `training.recall`, with commas; all by default")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="of the settings, every Nth from the Ith on")
    parser.add_argument("--count", type=int, default=2, help="prompts of each task and length")
    parser.add_argument("--repeats", type=int, default=3, help="prompts that are timed for each setting")
    parser.add_argument("--at-once", type=int, default=8, help="prompts in flight where nothing is timed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no further setting begins after so many")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--join", type=Path, nargs="+", metavar="RESULT", help="run nothing: make one of these results")
    parser.add_argument("--times", type=Path, metavar="RESULT", help="with --join: whose times to the first token")
    arguments = parser.parse_args()

    def save(result: dict[str, Any]) -> None:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    try:
        if arguments.join:
            result = joined([json.loads(path.read_text()) for path in arguments.join], arguments.attention or SETTINGS)
            if arguments.times:
                result = with_times(result, json.loads(arguments.times.read_text()))
            save(result)
            print(table(result))
            return
        if arguments.times:
            raise ValueError("--times: only with --join, whose results it gives the times")
        lengths = whole_numbers("--lengths", arguments.lengths)
        plan = Plan(tasks=some_tasks(arguments.tasks), lengths=lengths, count=arguments.count)
        if arguments.repeats < 1 or arguments.at_once < 1:
            raise ValueError("--repeats and --at-once must be 1 or more")
        first, of = share(arguments.share)
        deadline = time.monotonic() + arguments.seconds
        flags = ["--page-bounds", *(["--kv-cache-memory", SHARED_MEMORY] if of > 1 else [])]
        with served(arguments.url, flags) as running:
            settings, part = arguments.attention or SETTINGS, slice(first, None, of)
            result = run(running.url, settings, part, plan, arguments.repeats, arguments.at_once, deadline, save)
    except ValueError as error:
        parser.error(str(error))
    save(result)
    if of == 1:
        print(table(result))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server that was started is stopped, too
    main()
