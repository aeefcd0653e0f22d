"""How good `POST /v1/estimate` is: each first token beside what was predicted of it, alone and behind others.

    python -m benchmarks.estimates llama-8b --lengths 4k,32k,64k --queued 8 --out benchmarks/results/estimates-h200.json

Prompts are token ids that no cache has. A few are read before: the server learns what steps cost. `again` asks about
the last prompt once more, which is cached then. In a queue prompts of one length come one after the other, each after
its estimate, while those before are read and answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
from longreach.bench.launch import described, served
from longreach.bench.sizes import load_of
from longreach.bench.stream import Target, Timing
from longreach.bench.summary import environment

_SCENES = {"alone": "alone", "again": "again, cached", "queue": "one after the other"}
_QUESTION = 64  # tokens behind a prompt that is asked about again
_SENDING = 0.1  # seconds that a prompt takes to come to the engine, at most
_LEARNED = 2  # prompts of the first length, before anything is asked; then so many and one more at once


async def estimate(client: httpx.AsyncClient, target: Target, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """What the server says of a prompt."""
    body = {"model": target.model, "prompt": prompt, "max_tokens": max_tokens}
    return (await client.post("/v1/estimate", json=body)).raise_for_status().json()


async def asked(
    client: httpx.AsyncClient,
    target: Target,
    prompt: list[int],
    max_tokens: int,
    scene: str,
    rows: list[dict[str, Any]],
) -> asyncio.Task[None]:
    """Send a prompt after its estimate; its row is there when its task is done."""
    begun = time.perf_counter()
    told = await estimate(client, target, prompt, max_tokens)
    took = time.perf_counter() - begun

    timing = Timing()

    async def run() -> None:
        await target.stream(prompt, max_tokens, timing)
        seconds = told["seconds"]
        row = {
            "scene": scene,
            "tokens": len(prompt),
            "cached": sum(told["cached_tokens"].values()),
            "ahead": told["requests_ahead"],
            "estimate_s": took,
            "alone_s": seconds["alone"],
            "predicted_s": seconds["now"],
            "ttft_s": timing.ttft,
            "ratio": None if seconds["now"] is None else seconds["now"] / timing.ttft,
        }
        rows.append(row)
        print(line(row), file=sys.stderr, flush=True)

    task = asyncio.create_task(run())
    await asyncio.sleep(_SENDING)
    return task


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    predicted = "-" if row["predicted_s"] is None else f"{row['predicted_s']:.3f}"
    return (
        f"{row['scene']:6} {row['tokens']:7} tokens, {row['cached']:7} cached, {row['ahead']:2} ahead: predicted "
        f"{predicted} s, came in {row['ttft_s']:.3f} s, ratio {ratio}; asked in {row['estimate_s']:.3f} s"
    )


async def measure(
    url: str, lengths: tuple[int, ...], queued: int, max_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """All scenes at a server."""
    rows: list[dict[str, Any]] = []
    async with Target(url) as target, httpx.AsyncClient(base_url=url, timeout=600) as client:
        for _ in range(_LEARNED):
            await target.stream(target.prompt(lengths[0]), max_tokens)
        await asyncio.gather(*(target.stream(target.prompt(lengths[0]), max_tokens) for _ in range(_LEARNED + 1)))
        for length in lengths:
            prompt: list[int] = []
            for _ in range(repeats):
                prompt = target.prompt(length)
                await (await asked(client, target, prompt, max_tokens, "alone", rows))
            again = [*prompt, *target.prompt(_QUESTION)]
            await (await asked(client, target, again, max_tokens, "again", rows))
        for length in lengths:
            tasks = [
                await asked(client, target, target.prompt(length), max_tokens, "queue", rows) for _ in range(queued + 1)
            ]
            await asyncio.gather(*tasks)
    return rows


def table(result: dict[str, Any]) -> str:
    """Ratios of predicted to actual, by scene and length."""
    lines = [["prompts", "tokens", "asked", "median", "least", "greatest", "last"]]
    lines.append(["---", *(["---:"] * 6)])
    groups: dict[tuple[str, int], list[float]] = {}
    for row in result["rows"]:
        if row["ratio"] is not None:
            groups.setdefault((row["scene"], row["tokens"]), []).append(row["ratio"])
    for (scene, tokens), ratios in groups.items():
        figures = [statistics.median(ratios), min(ratios), max(ratios), ratios[-1]]
        lines.append([_SCENES[scene], f"{tokens:,}", str(len(ratios)), *(f"{figure:.2f}" for figure in figures)])
    where, model = result["environment"], result["model"]
    caption = f"Predicted seconds to the first token over actual ones; answers of {result['max_tokens']} tokens; "
    caption += f"{model.get('shape') or model['name']}; {where['device']}; torch {where['versions']['torch']}; "
    caption += f"{where['date']}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def main() -> None:
    """Measure, write the JSON and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimates", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", nargs="?", help="a URL, a shape (llama-8b, tiny) or a directory; the embedded model")
    parser.add_argument("--lengths", default="1k,4k")
    parser.add_argument("--queued", type=int, default=8, help="prompts before the last one")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2, help="prompts of a length alone")
    parser.add_argument("--serve-flags", default="", help="in one argument")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    lengths = tuple(load_of(lengths=arguments.lengths).lengths)
    with served(arguments.target, shlex.split(arguments.serve_flags)) as running:
        rows = asyncio.run(measure(running.url, lengths, arguments.queued, arguments.max_tokens, arguments.repeats))
    result = {
        "environment": environment(),
        "model": described(arguments.target),
        "flags": arguments.serve_flags,
        "queued": arguments.queued,
        "max_tokens": arguments.max_tokens,
        "rows": rows,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
