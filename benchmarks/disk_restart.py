"""A document that is asked about again after a restart of the server: its pages come from disk.

    python -m benchmarks.disk_restart llama-8b --tokens 127k --disk /tmp/pages --out result.json

The document is asked about once, and its pages are written. The server ends and another is started. Beside its running
answers the document is asked about again. The operating system's own copies of the files are dropped before, so that
they come from the drive, and once more without that. The drive's speed is measured with the same files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from longreach.bench.commands import names
from longreach.bench.launch import described, longreach, model_of
from longreach.bench.sizes import load_of
from longreach.bench.stream import Target, Timing
from longreach.bench.summary import environment

_QUESTION = 64  # tokens behind the document
_ANSWER = 8
_RUNNING_PROMPT = 256
_RUNNING_ANSWER = 2048
_READERS = 4  # files that are read at once where the drive is measured
_PIECE = 8 << 20
_DRIVE_BYTES = 4 << 30
_DEADLINE = 300.0
_LONG = 0.03  # seconds: pauses that are told with when they ended, the longest of them
_GAPS_TOLD = 24
_HEARTBEATS = 1.0  # seconds, after which the metrics tell of all that was done


def files(disk: Path) -> list[Path]:
    """The files of entries."""
    return [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 4096]


def drop(paths: Sequence[Path]) -> None:
    """See that the operating system has no copies of files in memory."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def drive_speed(paths: Sequence[Path]) -> float:
    """Bytes a second of reading files, some GiB of them, that are not in memory."""
    paths = paths[: max(1, _DRIVE_BYTES // paths[0].stat().st_size)]
    drop(paths)

    def read(path: Path) -> int:
        count, piece = 0, bytearray(_PIECE)
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(piece):
                count += got
        return count

    begun = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        count = sum(pool.map(read, paths))
    return count / (time.perf_counter() - begun)


async def number(target: Target, name: str) -> float:
    """A figure of the server's metrics."""
    found = re.search(rf"^longreach:{name}(?:_total)?{{.*}} (\S+)$", await target.metrics(), re.MULTILINE)
    if found is None:
        raise ValueError(f"the server does not tell longreach:{name}")
    return float(found[1])


async def until(done: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so.

    Raises:
        ValueError: it took too long.
    """
    deadline = time.perf_counter() + _DEADLINE
    while time.perf_counter() < deadline:
        if await done():
            return
        await asyncio.sleep(0.02)
    raise ValueError(f"the server was not done after {_DEADLINE} s")


async def first(url: str, tokens: int) -> tuple[dict[str, Any], list[int]]:
    """Read a document, and wait until all of it is written."""
    async with Target(url) as target:
        await target.stream(target.prompt(_RUNNING_PROMPT), _ANSWER)
        document = target.prompt(tokens)
        asked = await target.stream([*document, *target.prompt(_QUESTION)], _ANSWER)

        async def is_written() -> bool:
            return await number(target, "kv_disk_unwritten") == 0

        await until(is_written)
        seconds = time.perf_counter() - asked.sent
        written = await number(target, "kv_disk_written_bytes")
        return {"ttft_s": asked.ttft, "written_s": seconds, "written_bytes": written}, document


async def again(url: str, document: list[int], answers: int) -> dict[str, Any]:
    """Ask about the document beside running answers."""
    async with Target(url, seed=1) as target:
        await target.stream(target.prompt(_RUNNING_PROMPT), _ANSWER)
        timings = [Timing() for _ in range(answers)]
        running = [
            asyncio.create_task(target.stream(target.prompt(_RUNNING_PROMPT), _RUNNING_ANSWER, timing))
            for timing in timings
        ]

        async def are_running() -> bool:
            return all(len(timing.events) > 20 for timing in timings)

        await until(are_running)
        asked = await target.stream([*document, *target.prompt(_QUESTION)], _ANSWER)
        beside = [gap for timing in timings for gap in timing.gaps_between(asked.sent, asked.events[0])]
        went_on = sum(timing.events[-1] > asked.events[0] for timing in timings)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(_HEARTBEATS)
        return {
            "ttft_s": asked.ttft,
            "cached": (asked.cached or 0) / (len(document) + _QUESTION),
            "read_bytes": await number(target, "kv_disk_read_bytes"),
            "answers": went_on,
            "longest_gap_s": max(beside, default=0.0),
            "long_gaps": sorted(
                (round(gap, 4), round(at - asked.sent, 3))
                for timing in timings
                for gap, at in zip(timing.gaps, timing.events[1:], strict=False)
                if gap > _LONG and asked.sent <= at <= asked.events[0]
            )[-_GAPS_TOLD:],
        }


def measure(
    target: str, tokens: int, disk: Path, flags: Sequence[str], answers: int, places: Sequence[str]
) -> dict[str, Any]:
    """What goes to JSON: the first reading, the drive, and a restart with the files in each of some places."""
    flags = [*flags, "--kv-disk", str(disk)]
    with model_of(target) as model:
        with longreach(model, flags) as running:
            read, document = asyncio.run(first(running.url, tokens))
        print(f"read: {read}", file=sys.stderr, flush=True)
        paths = files(disk)
        speed = drive_speed(paths)
        print(f"drive: {speed / 1e9:.2f} GB/s", file=sys.stderr, flush=True)
        restarts = []
        for where in places:
            if where == "drive":
                drop(paths)
            with longreach(model, flags) as running:
                asked = asyncio.run(again(running.url, document, answers))
            restarts.append({"files": where, "of_first": asked["ttft_s"] / read["ttft_s"], **asked})
            print(f"again: {restarts[-1]}", file=sys.stderr, flush=True)
    return {
        "environment": environment(),
        "model": described(target),
        "tokens": tokens,
        "flags": " ".join(flags[:-2]),
        "drive_bytes_per_s": speed,
        "first": read,
        "restarts": restarts,
    }


def table(result: dict[str, Any]) -> str:
    """The restarts beside the first reading."""
    lines = [["", "TTFT (s)", "of the first", "from the cache", "longest pause of a running answer (ms)"]]
    lines.append(["---", "---:", "---:", "---:", "---:"])
    lines.append(["read for the first time", f"{result['first']['ttft_s']:.2f}", "", "", ""])
    for row in result["restarts"]:
        name = f"after a restart, files in {'memory' if row['files'] == 'memory' else 'the drive alone'}"
        shares = [f"{row['of_first']:.2f}", f"{100 * row['cached']:.1f}%"]
        lines.append([name, f"{row['ttft_s']:.2f}", *shares, f"{1000 * row['longest_gap_s']:.0f}"])
    first, where, model = result["first"], result["environment"], result["model"]
    seconds, written, speed = first["written_s"], first["written_bytes"], result["drive_bytes_per_s"]
    caption = f"{result['tokens']:,} tokens, {written / 2**30:.1f} GiB, written {seconds:.1f} s after the question; "
    caption += f"the drive reads {speed / 1e9:.2f} GB/s; {result['restarts'][0]['answers']} running answers; "
    caption += f"{model.get('shape') or model['name']}; {where['device']}; torch {where['versions']['torch']}; "
    caption += f"{where['date']}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def main() -> None:
    """Measure, write the JSON and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disk_restart", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("target", nargs="?", default="llama-8b", help="a shape (llama-8b, tiny) or a directory")
    parser.add_argument("--tokens", default="127k", help="of the document")
    parser.add_argument("--disk", type=Path, required=True, help="an empty directory for the pages")
    parser.add_argument("--answers", type=int, default=8, help="that run beside the second question")
    parser.add_argument("--files", default="drive,memory", help="where they are at each restart, with commas")
    parser.add_argument(
        "--serve-flags", default="--kv-disk-bytes 40GiB --kv-offload-bytes 24GiB", help="in one argument"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    arguments.disk.mkdir(parents=True, exist_ok=True)
    flags = arguments.serve_flags.split()
    tokens = load_of(long_prompt=arguments.tokens).long_prompt
    places = names(arguments.files)
    result = measure(arguments.target, tokens, arguments.disk, flags, arguments.answers, places)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
