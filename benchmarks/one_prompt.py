"""One very long prompt: its time to the first token, the delays after it, and memory and progress while it is read.

    python -m benchmarks.one_prompt llama-8b --tokens 1000000 --serve-flags "--max-model-len 1M --kv-cache-dtype fp8" \\
        --out benchmarks/results/one-prompt-h200.json

The server tells its progress in comments of the stream. What each GPU has in use is noted at the same moments.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import orjson
from longreach.bench.launch import described, served
from longreach.bench.stream import Target
from longreach.bench.summary import environment, summarise

_WARM_UP = 4096
_SILENCE = 5.0  # seconds between two comments
_PROGRESS = re.compile(r"^: prefill (\d+)/")
_TIMEOUT = httpx.Timeout(30, read=1800)


def memory_gib() -> list[float]:
    """What each GPU of this machine has in use; none without a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = [smi, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return [float(line) / 1024 for line in said.split()]


async def ask(url: str, tokens: int, max_tokens: int) -> dict[str, Any]:
    """Send one prompt, and note what comes and when.

    Raises:
        ValueError: the server refused it or ended its stream with an error.
    """
    moments: list[dict[str, Any]] = []
    arrived: list[float] = []
    async with Target(url) as target, httpx.AsyncClient(base_url=url, timeout=_TIMEOUT) as client:
        await target.stream(target.prompt(_WARM_UP), 8)
        body = {"model": target.model, "prompt": target.prompt(tokens), "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"progress_comments": True}}
        content, sent = orjson.dumps(body), time.perf_counter()
        headers = {"Content-Type": "application/json"}
        async with client.stream("POST", "/v1/completions", content=content, headers=headers) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code}: {(await response.aread())[:500]!r}")
            async for line in response.aiter_lines():
                seconds = time.perf_counter() - sent
                if found := _PROGRESS.match(line):
                    gib = await asyncio.to_thread(memory_gib)
                    moments.append({"seconds": round(seconds, 2), "read": int(found[1]), "memory_gib": gib})
                    print(f"{seconds:7.1f} s: {int(found[1]):,} tokens, {gib} GiB", file=sys.stderr, flush=True)
                elif line.startswith("data: {"):
                    event = orjson.loads(line[6:])
                    if "error" in event:
                        raise ValueError(f"the stream ended in an error: {event['error']}")
                    arrived += [seconds] * any(choice["text"] for choice in event["choices"])
    if len(arrived) < 2:
        raise ValueError(f"{len(arrived)} events with tokens came, which have no delay between them")
    gaps = [after - before for before, after in itertools.pairwise(arrived)]
    return {"ttft_s": arrived[0], "itl_s": summarise(gaps), "moments": moments, "memory_gib": memory_gib()}


def measure(target: str, tokens: int, max_tokens: int, flags: Sequence[str]) -> dict[str, Any]:
    """What goes to JSON."""
    with served(target, [*flags, "--keep-alive-seconds", f"{_SILENCE:g}"]) as running:
        print(f"ready after {running.start_s:.1f} s", file=sys.stderr, flush=True)
        asked = asyncio.run(ask(running.url, tokens, max_tokens))
    about = {"environment": environment(), "model": described(target), "flags": " ".join(flags)}
    return about | {"start_s": running.start_s, "prompt_tokens": tokens, "one_prompt": asked}


def table(result: dict[str, Any]) -> str:
    """The figures, and a few of the moments."""
    asked, where = result["one_prompt"], result["environment"]
    lines = [["prompt tokens", "TTFT (s)", "ITL p50 / p99 (ms)", "memory of each GPU (GiB)"], ["---:"] * 4]
    itl = f"{1000 * asked['itl_s']['p50']:.1f} / {1000 * asked['itl_s']['p99']:.1f}"
    lines.append([f"{result['prompt_tokens']:,}", f"{asked['ttft_s']:.1f}", itl, _gib(asked["memory_gib"])])
    moments = asked["moments"]
    progress = [["after (s)", "tokens read", "memory of each GPU (GiB)"], ["---:"] * 3]
    for moment in moments[:: max(1, len(moments) // 8)]:
        progress.append([f"{moment['seconds']:.0f}", f"{moment['read']:,}", _gib(moment["memory_gib"])])
    versions = where["versions"]
    caption = f"{result['model'].get('shape') or result['model']['name']}, `{result['flags']}`; {where['device']}; "
    caption += f"torch {versions['torch']}, triton {versions['triton']}; {where['date']}."
    parts = ["\n".join("| " + " | ".join(cells) + " |" for cells in rows) for rows in (lines, progress)]
    return "\n\n".join(parts if moments else parts[:1]) + f"\n\n{caption}\n"


def _gib(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def main() -> None:
    """Measure, write the JSON and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_prompt", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", nargs="?", default="llama-8b", help="a shape (llama-8b, tiny), a directory or a URL")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the prompt")
    parser.add_argument("--max-tokens", type=int, default=128, help="of the answer")
    parser.add_argument("--serve-flags", default="", help="in one argument")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    result = measure(arguments.target, arguments.tokens, arguments.max_tokens, arguments.serve_flags.split())
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
