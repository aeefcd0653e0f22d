"""What a server is measured by: latency by prompt length, batches, fairness beside a long prompt, and reuse of pages.

Latency is the time to the first token (TTFT), from sending the request to the first streamed text, the inter-token
latency (ITL), the time between two events of one stream, and the time from end to end. Each suite takes a `Target` and
returns plain data for JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
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

_STREAM_TOKENS = 1000  # prompts of the running streams and of the newcomer
_STREAMS = 8
_QUESTION_TOKENS = 64  # behind a document that is in the prefix cache
_SETTLE_SECONDS = 1.0


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


async def fairness(target: Target, load: Load, report: Report) -> dict[str, Any]:
    """Eight running streams, then a long prompt, then a short one: who waits for whom, and how long."""
    alone = await target.stream(target.prompt(load.long_prompt), 2)
    running = [Timing() for _ in range(_STREAMS)]
    room = (target.max_model_len or 16384) - _STREAM_TOKENS
    streams = [
        asyncio.create_task(target.stream(target.prompt(_STREAM_TOKENS), min(8000, room), timing)) for timing in running
    ]
    try:
        await _until(lambda: all(len(timing.events) > 1 for timing in running), streams)
        start = time.perf_counter()
        await asyncio.sleep(_SETTLE_SECONDS)
        sent = time.perf_counter()
        long = asyncio.create_task(target.stream(target.prompt(load.long_prompt), 2))
        await asyncio.sleep(0.3 * alone.ttft)
        newcomer = await target.stream(target.prompt(_STREAM_TOKENS), 2)
        read = await long
        end = read.sent + read.ttft
        before = [gap for timing in running for gap in timing.gaps_between(start, sent)]
        beside = [gap for timing in running for gap in timing.gaps_between(sent, end)]
    finally:
        await _stop(streams)
    result = {
        "streams": _STREAMS,
        "long_prompt_tokens": load.long_prompt,
        "itl_before_s": summarise(before),
        "itl_beside_s": summarise(beside),
        "newcomer_ttft_s": newcomer.ttft,
        "long_ttft_s": read.ttft,
        "long_ttft_alone_s": alone.ttft,
    }
    report(
        f"beside a prompt of {load.long_prompt}: ITL p50 {1e3 * result['itl_beside_s']['p50']:.1f} ms "
        f"p99 {1e3 * result['itl_beside_s']['p99']:.1f} ms (before {1e3 * result['itl_before_s']['p50']:.1f} ms), "
        f"newcomer's TTFT {newcomer.ttft:.3f} s, its own {read.ttft:.2f} s, {read.ttft / alone.ttft:.3f} x alone"
    )
    return result


async def reuse(target: Target, load: Load, report: Report) -> dict[str, Any]:
    """A second question on a long document, and the retry of a prompt whose caller left after 90 percent of it."""
    document = target.prompt(load.long_prompt)
    first = await target.stream(document, 2)
    second = await target.stream(document + target.prompt(40), 2)
    other = target.prompt(load.long_prompt)
    gone = asyncio.create_task(target.stream(other, 2))
    await asyncio.sleep(0.9 * first.ttft)
    await _stop([gone])
    retry = await target.stream(other, 2)
    report(
        f"document of {load.long_prompt}: TTFT {first.ttft:.2f} s, of a second question {second.ttft:.3f} s, "
        f"of a retry after 90 percent {retry.ttft:.2f} s ({retry.ttft / first.ttft:.1%})"
    )
    return {
        "prompt_tokens": load.long_prompt,
        "ttft_s": first.ttft,
        "second_question_ttft_s": second.ttft,
        "retry_ttft_s": retry.ttft,
    }


async def _until(condition: Callable[[], bool], tasks: list[asyncio.Task[Timing]]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
        for task in tasks:
            if task.done():
                task.result()  # raises what it failed with
                raise ValueError("a stream that should run beside the others is over; the context is too short for it")


async def _stop(tasks: list[asyncio.Task[Timing]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
