"""What a server is measured by: latency by prompt length, batches, fairness beside a long prompt, and reuse of pages.

Latency is the time to the first token (TTFT), from sending the request to the first streamed text, and the inter-token
latency (ITL), the time between two events of one stream. Each suite takes a `Target` and returns plain data for JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from .stream import Target, Timing
from .summary import summarise

Report = Callable[[str], object]

_STREAM_TOKENS = 1000  # prompts of the running streams and of the newcomer
_STREAMS = 8
_SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Load:
    """How much is sent: prompt lengths in tokens, rounds, tokens of an answer, batches of (requests, prompt length)."""

    lengths: tuple[int, ...] = (4096, 16384)
    concurrency: int = 1
    repeats: int = 3
    max_tokens: int = 64
    batches: tuple[tuple[int, int], ...] = ()
    batch_tokens: int = 128
    long_prompt: int = 131072


async def latency(target: Target, load: Load, report: Report) -> list[dict[str, Any]]:
    """TTFT and ITL of `concurrency` requests at a time, by prompt length; a row for each."""
    rows: list[dict[str, Any]] = []
    for length in load.lengths:
        if target.max_model_len and length + load.max_tokens > target.max_model_len:
            report(f"skipped {length}: the server takes {target.max_model_len} tokens")
            continue
        await target.stream(target.prompt(length), 4)  # memory is touched and code compiled before the clock runs
        timings: list[Timing] = []
        start = time.perf_counter()
        for _ in range(load.repeats):
            prompts = [target.prompt(length) for _ in range(load.concurrency)]
            timings += await asyncio.gather(*(target.stream(prompt, load.max_tokens) for prompt in prompts))
        rows.append(
            {
                "prompt_tokens": length,
                "concurrency": load.concurrency,
                "requests": len(timings),
                "max_tokens": load.max_tokens,
                "seconds": time.perf_counter() - start,
                "ttft_s": summarise([timing.ttft for timing in timings]),
                "itl_s": summarise([gap for timing in timings for gap in timing.gaps]),
            }
        )
        ttft, itl = rows[-1]["ttft_s"], rows[-1]["itl_s"]
        report(
            f"{length:>8} tokens x {load.concurrency}: TTFT p50 {ttft['p50']:.3f} s p99 {ttft['p99']:.3f} s, "
            f"ITL p50 {1e3 * itl['p50']:.2f} ms p99 {1e3 * itl['p99']:.2f} ms"
        )
    return rows


async def throughput(target: Target, load: Load, report: Report) -> list[dict[str, Any]]:
    """Batches that are sent all at once, until the last token: seconds, and tokens a second of prompts and answers."""
    rows: list[dict[str, Any]] = []
    for requests, length in load.batches:
        prompts = [target.prompt(length) for _ in range(requests)]
        start = time.perf_counter()
        timings = await asyncio.gather(*(target.stream(prompt, load.batch_tokens) for prompt in prompts))
        seconds = time.perf_counter() - start
        rows.append(
            {
                "requests": requests,
                "prompt_tokens": length,
                "max_tokens": load.batch_tokens,
                "seconds": seconds,
                "prompt_tokens_per_s": requests * length / seconds,
                "output_tokens_per_s": requests * load.batch_tokens / seconds,
                "ttft_s": summarise([timing.ttft for timing in timings]),
            }
        )
        report(f"{requests} x {length} tokens, {load.batch_tokens} out: {seconds:.2f} s")
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


SUITES: dict[str, Callable[[Target, Load, Report], Awaitable[Any]]] = {
    "latency": latency,
    "throughput": throughput,
    "fairness": fairness,
    "reuse": reuse,
}


async def measure(url: str, suites: list[str], load: Load, report: Report) -> dict[str, Any]:
    """Run some suites against the server at `url`; the results by suite.

    Raises:
        ValueError: there is no server, or a request was refused or failed.
    """
    async with Target(url) as target:
        return {suite: await SUITES[suite](target, load, report) for suite in suites}


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
