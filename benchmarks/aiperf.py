"""AIPerf against a server that runs, by context length: presets for the flags, and its results as one Markdown table.

    python3 -m venv aiperf-env && aiperf-env/bin/pip install aiperf==0.13.0     # its pins clash with the server's
    python -m benchmarks.aiperf http://127.0.0.1:8000 --tokenizer server/longreach/default_model \\
        --aiperf aiperf-env/bin/aiperf --preset lengths --lengths 1k,4k,16k --out aiperf-results

Presets: `lengths` sends one prompt at a time, `poisson` at --rate a second, `prefix` gives all prompts one beginning
that makes up nine tenths of them. Prompts are others in each run, so that no prefix cache knows them. What AIPerf
writes stays in a folder for each length below OUT.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longreach.bench.sizes import load_of

INSTALL = "python3 -m venv aiperf-env && aiperf-env/bin/pip install aiperf==0.13.0, then --aiperf aiperf-env/bin/aiperf"
METRICS = {"time_to_first_token": "TTFT", "inter_token_latency": "ITL", "request_latency": "end to end"}
PARTS = ("p50", "p90", "p99")


def _lengths(length: int, args: argparse.Namespace) -> list[str]:
    return ["--isl", str(length), "--concurrency", "1"]


def _poisson(length: int, args: argparse.Namespace) -> list[str]:
    return ["--isl", str(length), "--request-rate", str(args.rate), "--arrival-pattern", "poisson"]


def _prefix(length: int, args: argparse.Namespace) -> list[str]:
    shared = 9 * length // 10
    pool = ["--num-prefix-prompts", "1", "--prefix-prompt-length", str(shared)]
    return ["--isl", str(length - shared), "--concurrency", "1", *pool, "--warmup-request-count", "1"]


PRESETS: dict[str, Callable[[int, argparse.Namespace], list[str]]] = {
    "lengths": _lengths,
    "poisson": _poisson,
    "prefix": _prefix,
}


def command(executable: str, length: int, model: str, folder: Path, args: argparse.Namespace) -> list[str]:
    """AIPerf's command line for one prompt length."""
    return [
        *(executable, "profile", "--model", model, "--url", args.url, "--tokenizer", str(args.tokenizer.resolve())),
        *("--endpoint-type", "completions", "--streaming", "--use-server-token-count", "--use-legacy-max-tokens"),
        *("--isl-stddev", "0", "--osl", str(args.max_tokens), "--osl-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
        *("--request-count", str(args.requests)),
        *("--artifact-dir", str(folder.resolve()), "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
        *PRESETS[args.preset](length, args),
    ]


def table(rows: list[tuple[int, dict[str, Any]]]) -> str:
    """A row for each prompt length, from AIPerf's summaries; times in milliseconds."""
    head = ["prompt tokens", "requests", *(f"{name} {' / '.join(PARTS)} (ms)" for name in METRICS.values())]
    lines = [head, ["---:"] * len(head)]
    for length, summary in rows:
        cells = [f"{length:,}", f"{summary['request_count']['avg']:.0f}"]
        for tag in METRICS:
            cells.append(" / ".join(f"{summary[tag][part]:.1f}" for part in PARTS))
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def served(url: str) -> str:
    """The name of the model that a server serves."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            return json.load(answer)["data"][0]["id"]
    except (OSError, LookupError, ValueError) as error:
        sys.exit(f"aiperf.py: error: no OpenAI-compatible server answers at {url}: {error}")


def main() -> None:
    """Run AIPerf once for each length and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of the served model's tokenizer")
    parser.add_argument("--aiperf", default="aiperf", help="the executable, in an environment of its own")
    parser.add_argument("--preset", choices=PRESETS, default="lengths")
    parser.add_argument("--lengths", default="1k,4k,16k")
    parser.add_argument("--requests", type=int, default=10, help="at each length")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second, for poisson")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("aiperf-results"))
    args = parser.parse_args()
    executable = shutil.which(args.aiperf)
    if executable is None:
        sys.exit(f"aiperf.py: error: {args.aiperf} is not there; install AIPerf: {INSTALL}")
    if not (args.tokenizer / "tokenizer.json").is_file():
        sys.exit(f"aiperf.py: error: --tokenizer: {args.tokenizer} has no tokenizer.json")
    try:
        lengths = load_of(lengths=args.lengths).lengths
    except ValueError as error:
        sys.exit(f"aiperf.py: error: {error}")
    model = served(args.url)
    rows = []
    for length in lengths:
        folder = args.out / f"{args.preset}-{length}"
        done = subprocess.run(command(executable, length, model, folder, args), capture_output=True, text=True)
        summary = folder / "profile_export_aiperf.json"
        if done.returncode or not summary.is_file():
            said = (done.stdout + done.stderr).strip().splitlines()[-15:]
            sys.exit("\n".join([f"aiperf.py: error: AIPerf failed at {length} tokens:", *said]))
        rows.append((length, json.loads(summary.read_text())))
    print(table(rows))


if __name__ == "__main__":
    main()
