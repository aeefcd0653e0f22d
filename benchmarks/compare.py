"""longreach's server and plain transformers, the same model shape with random weights, one after the other in one run.

    python benchmarks/compare.py --shape llama-8b --lengths 4096,16384,65536 --out benchmarks/results/latency-h200.json

Each runs in a process of its own, so that neither holds memory while the other is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import shapes

HERE = Path(__file__).resolve().parent


@contextlib.contextmanager
def server(model: Path, port: int, deadline: float = 300) -> Iterator[str]:
    """A longreach server for `model` with random weights; its URL, once it is healthy."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "longreach", "serve", str(model), "--random-weights", "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        start = time.monotonic()
        while not _healthy(url):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            if time.monotonic() - start > deadline:
                raise SystemExit(f"the server was not ready after {deadline:.0f} s")
            time.sleep(0.2)
        print(f"server ready after {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Measure both and write one JSON with a run each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="tiny")
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--max-tokens", default="64")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    common = ["--lengths", args.lengths, "--repeats", args.repeats, "--max-tokens", args.max_tokens]
    with tempfile.TemporaryDirectory() as scratch:
        model, ours, theirs = Path(scratch) / args.shape, Path(scratch) / "ours.json", Path(scratch) / "theirs.json"
        shapes.write(args.shape, model)
        vocabulary = str(min(4000, shapes.config(args.shape).vocab_size))
        with server(model, args.port) as url:
            _run("latency.py", *common, "--url", url, "--vocab", vocabulary, "--out", str(ours))
        _run("transformers_baseline.py", *common, "--shape", args.shape, "--out", str(theirs))
        result = json.loads(ours.read_text())
        result["model"] = {"shape": args.shape, "weights": "random", "dtype": "bfloat16"}
        result["runs"] += json.loads(theirs.read_text())["runs"]
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def _run(script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(HERE / script), *arguments], check=True, env=os.environ)


if __name__ == "__main__":
    main()
