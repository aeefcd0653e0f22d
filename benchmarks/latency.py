"""Latency by context length, against any server that speaks the OpenAI completions API.

    python benchmarks/latency.py --lengths 4096,16384,65536 --out result.json

Prompts are random token ids, new ones each time, so that no prefix cache answers; lengths are exact. Requests of one
length run `--concurrency` at a time, `--repeats` rounds; every answer has exactly `--max-tokens` tokens. Two figures:
the time to the first token (TTFT), from sending the request to the first streamed text, and the inter-token latency
(ITL), the time between two tokens of one stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
from summary import environment, summarise

_TIMEOUT = httpx.Timeout(10, read=1800)


@dataclass
class Timing:
    """When things happened in one stream, in seconds: time to the first token, and the gaps between tokens."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)


async def stream_once(client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int) -> Timing:
    """Send one prompt and time its tokens. Raises RuntimeError on an error or another number of tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timing, tokens, last = Timing(), None, 0.0
    start = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the stream ended in an error: {event['error']}")
            if usage := event.get("usage"):
                tokens = usage["completion_tokens"]
            if any(choice["text"] for choice in event["choices"]):
                if last:
                    timing.gaps.append(now - last)
                else:
                    timing.ttft = now - start
                last = now
    if tokens != max_tokens or not last:
        raise RuntimeError(f"asked for {max_tokens} tokens, got {tokens}")
    return timing


async def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure every length; one row of results each."""
    rng = random.Random(args.seed)
    rows: list[dict[str, object]] = []
    async with httpx.AsyncClient(base_url=args.url, timeout=_TIMEOUT) as client:
        served = (await client.get("/v1/models")).json()["data"][0]
        for length in args.lengths:
            if length + args.max_tokens > served["max_model_len"]:
                print(f"skipped {length}: the server takes {served['max_model_len']} tokens", file=sys.stderr)
                continue
            # Not measured: memory is touched and code compiled before the clock runs.
            await stream_once(client, served["id"], _ids(rng, length, args.vocab), 4)
            timings: list[Timing] = []
            start = time.perf_counter()
            for _ in range(args.repeats):
                prompts = [_ids(rng, length, args.vocab) for _ in range(args.concurrency)]
                streams = (stream_once(client, served["id"], prompt, args.max_tokens) for prompt in prompts)
                timings += await asyncio.gather(*streams)
            rows.append(
                {
                    "prompt_tokens": length,
                    "concurrency": args.concurrency,
                    "requests": len(timings),
                    "max_tokens": args.max_tokens,
                    "seconds": time.perf_counter() - start,
                    "ttft_s": summarise([timing.ttft for timing in timings]),
                    "itl_s": summarise([gap for timing in timings for gap in timing.gaps]),
                }
            )
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _ids(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(16, vocab) for _ in range(length)]


def _line(row: dict) -> str:
    ttft, itl = row["ttft_s"], row["itl_s"]
    return (
        f"{row['prompt_tokens']:>8} tokens x {row['concurrency']}: "
        f"TTFT p50 {ttft['p50']:.3f} s p99 {ttft['p99']:.3f} s, "
        f"ITL p50 {1e3 * itl['p50']:.2f} ms p99 {1e3 * itl['p99']:.2f} ms"
    )


def main() -> None:
    """Parse the command line, measure, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--lengths", default="1024,4096,16384", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=4000, help="prompt ids are drawn below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="longreach", help="what the rows are called in tables and plots")
    parser.add_argument("--out", type=Path, help="write JSON here instead of to standard output")
    args = parser.parse_args()
    result = {"environment": environment(), "runs": [{"name": args.name, "rows": asyncio.run(measure(args))}]}
    text = json.dumps(result, indent=1) + "\n"
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
