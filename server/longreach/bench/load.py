"""What a server is measured by: latency by prompt length, and batches.

Latency is the time to the first token (TTFT), from sending the request to the first streamed text, the inter-token
latency (ITL), the time between two events of one stream, and the time from end to end. Each suite takes a `Target` and
returns plain data for JSON.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from longreach.bench.goodput import Objective
from longreach.bench.monitor import watch
from longreach.bench.stream import Target, Timing
from longreach.bench.summary import summarise

Report = Callable[[str], object]

_QUESTION_TOKENS = 64  # behind a document that is in the prefix cache


@dataclass(frozen=True)
class Load:
    """How much is sent: prompt lengths in tokens, rounds, tokens of an answer, batches of (requests, prompt length).

    Latency is measured with each of `concurrencies` requests at a time, in `repeats` rounds, or fewer once `seconds`
    have passed; if `cached`, then again with prompts of which all but a short question is in the prefix cache. Arrivals
    are `arrivals` requests at each of `rates` a second, of lengths drawn from `arrival_lengths`.
    """

    lengths: tuple[int, ...] = (4096, 16384)
    concurrencies: tuple[int, ...] = (1,)
    repeats: int = 3
    max_tokens: int = 64
    seconds: float = math.inf
    cached: bool = False
    rates: tuple[float, ...] = ()
    arrivals: int = 16
    arrival_lengths: tuple[int, ...] = ()
    objective: Objective = field(default_factory=Objective)
    batches: tuple[tuple[int, int], ...] = ()
    batch_tokens: int = 128
    long_prompt: int = 131072


async def latency(target: Target, load: Load, report: Report) -> list[dict[str, Any]]:
    """TTFT, ITL and end to end by prompt length, concurrency and whether the prefix is cached; a row for each."""
    rows: list[dict[str, Any]] = []
    for length in load.lengths:
        if target.max_model_len and length + load.max_tokens > target.max_model_len:
            report(f"skipped {length}: the server takes {target.max_model_len} tokens")
            continue
        document = target.prompt(max(1, length - _QUESTION_TOKENS) if load.cached else length)
        await target.stream(document, 4)  # memory is touched and code compiled before the clock runs
        # The cached ones come first, while all of the document is sure to be there.
        for prefix in (document, []) if load.cached else ([],):
            for concurrency in load.concurrencies:
                rows.append(await _rounds(target, load, length, prefix, concurrency))
                report(_said(rows[-1]))
    return sorted(rows, key=lambda row: (row["prompt_tokens"], row["prefix"] == "cached"))


async def _rounds(target: Target, load: Load, length: int, prefix: list[int], concurrency: int) -> dict[str, Any]:
    timings: list[Timing] = []
    rounds = 0
    async with watch(target) as peaks:
        start = time.perf_counter()
        while rounds < load.repeats and (rounds == 0 or time.perf_counter() - start < load.seconds):
            prompts = [prefix + target.prompt(length - len(prefix)) for _ in range(concurrency)]
            timings += await asyncio.gather(*(target.stream(prompt, load.max_tokens) for prompt in prompts))
            rounds += 1
        seconds = time.perf_counter() - start
    cached = [timing.cached for timing in timings if timing.cached is not None]
    good = sum(load.objective.met(length, timing) for timing in timings)
    return {
        "prompt_tokens": length,
        "prefix": "cached" if prefix else "cold",
        "cached_tokens": sum(cached) / len(cached) if cached else None,
        "concurrency": concurrency,
        "requests": len(timings),
        "max_tokens": load.max_tokens,
        "seconds": seconds,
        "goodput_per_s": good / seconds,
        "good": good,
        "ttft_s": summarise([timing.ttft for timing in timings]),
        "itl_s": summarise([gap for timing in timings for gap in timing.gaps]),
        "e2e_s": summarise([timing.e2e for timing in timings]),
        **peaks,
    }


def _said(row: dict[str, Any]) -> str:
    ttft, itl = row["ttft_s"], row["itl_s"]
    return (
        f"{row['prompt_tokens']:>8} tokens x {row['concurrency']}, {row['prefix']}: TTFT p50 {ttft['p50']:.3f} s "
        f"p99 {ttft['p99']:.3f} s, ITL p50 {1e3 * itl['p50']:.2f} ms p99 {1e3 * itl['p99']:.2f} ms"
    )


async def throughput(target: Target, load: Load, report: Report) -> list[dict[str, Any]]:
    """Batches that are sent all at once, until the last token: seconds, and tokens a second of prompts and answers.

    Where the server knows the tier, once more as `flex` requests: as a batch that nobody watches would be sent.
    """
    rows: list[dict[str, Any]] = []
    tiers = (None, "flex") if await target.knows_flex() else (None,)
    if "flex" not in tiers:
        report("batches are not sent as flex requests, too: the server does not say that it knows them")
    for tier in tiers:
        for requests, length in load.batches:
            prompts = [target.prompt(length) for _ in range(requests)]
            start = time.perf_counter()
            timings = await asyncio.gather(*(target.stream(prompt, load.batch_tokens, tier=tier) for prompt in prompts))
            seconds = time.perf_counter() - start
            rows.append(
                {
                    "requests": requests,
                    "prompt_tokens": length,
                    "max_tokens": load.batch_tokens,
                    "service_tier": tier or "default",
                    "seconds": seconds,
                    "prompt_tokens_per_s": requests * length / seconds,
                    "output_tokens_per_s": requests * load.batch_tokens / seconds,
                    "ttft_s": summarise([timing.ttft for timing in timings]),
                    "itl_s": summarise([gap for timing in timings for gap in timing.gaps]),
                    "e2e_s": summarise([timing.e2e for timing in timings]),
                }
            )
            of_tier = "" if tier is None else f", {tier}"
            report(f"{requests} x {length} tokens, {load.batch_tokens} out{of_tier}: {seconds:.2f} s")
    return rows
