"""Requests that come when they come: a Poisson process, whatever the server is doing, with prompts of several lengths.

A closed loop, which sends the next request when one is answered, slows down with the server and hides its queue; an
open one shows it. What counts is goodput: requests a second that were answered soon enough.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from longreach.bench.load import Load, Report
from longreach.bench.stream import RefusedError, Target, Timing
from longreach.bench.summary import summarise

_SEED = 5  # the same arrivals at each rate but for their pace, and in each run


async def arrivals(target: Target, load: Load, report: Report) -> list[dict[str, Any]]:
    """`load.arrivals` requests at each of `load.rates` a second; a row for each rate.

    `refused` counts those for which the server had no room; `by_length` has TTFT for each prompt length that was drawn.
    """
    lengths = [
        n for n in load.arrival_lengths if not target.max_model_len or n + load.max_tokens <= target.max_model_len
    ]
    if load.rates and not lengths:
        raise ValueError(f"--arrival-lengths: give one that the server takes ({target.max_model_len} tokens)")
    return [await _at_rate(target, load, rate, lengths, report) for rate in load.rates]


async def _at_rate(target: Target, load: Load, rate: float, lengths: list[int], report: Report) -> dict[str, Any]:
    rng = random.Random(_SEED)
    plan = [(rng.expovariate(1), rng.choice(lengths)) for _ in range(load.arrivals)]
    start, due = time.perf_counter(), 0.0
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for gap, length in plan:
                due += gap / rate
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                tasks.append(group.create_task(_one(target, target.prompt(length), load.max_tokens)))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    seconds = time.perf_counter() - start
    ends = [(length, task.result()) for (_, length), task in zip(plan, tasks, strict=True)]
    answered = [(length, timing) for length, timing in ends if timing is not None]
    if not answered:
        raise ValueError(f"the server refused all {len(ends)} requests that came at {rate:g} a second")
    good = sum(load.objective.met(length, timing) for length, timing in answered)
    row = {
        "rate_per_s": rate,
        "requests": len(ends),
        "refused": len(ends) - len(answered),
        "max_tokens": load.max_tokens,
        "seconds": seconds,
        "good": good,
        "goodput_per_s": good / seconds,
        "ttft_s": summarise([timing.ttft for _, timing in answered]),
        "itl_s": summarise([gap for _, timing in answered for gap in timing.gaps]),
        "e2e_s": summarise([timing.e2e for _, timing in answered]),
        "by_length": [
            {
                "prompt_tokens": length,
                "ttft_s": summarise([timing.ttft for n, timing in answered if n == length]),
            }
            for length in sorted({length for length, _ in answered})
        ],
    }
    report(
        f"{rate:g} requests/s: {good} of {len(ends)} soon enough, {row['refused']} refused, goodput "
        f"{row['goodput_per_s']:.3f}/s, TTFT p50 {row['ttft_s']['p50']:.3f} s p99 {row['ttft_s']['p99']:.3f} s"
    )
    return row


async def _one(target: Target, prompt: list[int], max_tokens: int) -> Timing | None:
    """The timing of a request, None if the server had no room for it."""
    try:
        return await target.stream(prompt, max_tokens)
    except RefusedError:
        return None
