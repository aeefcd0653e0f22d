"""Suites that compare servers and that no user of one needs: fairness beside a long prompt, and reuse of pages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from longreach.bench.arrivals import arrivals
from longreach.bench.load import Load, Report, latency, throughput
from longreach.bench.stream import Target, Timing
from longreach.bench.suites import Suites
from longreach.bench.summary import summarise

_STREAM_TOKENS = 1000  # prompts of the running streams and of the newcomer
_STREAMS = 8
_SETTLE_SECONDS = 1.0


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


SUITES: Suites = {
    "latency": latency,
    "throughput": throughput,
    "fairness": fairness,
    "reuse": reuse,
    "arrivals": arrivals,
}
