"""One model by several servers, one after the other; all are measured in one run, ours first.

python -m benchmarks.compare llama-8b --peers vllm,transformers --suites latency,throughput --out result.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from longreach.bench import report
from longreach.bench.commands import names
from longreach.bench.sizes import load_of
from longreach.util.extras import require

from benchmarks.compare.measure import compare


def main() -> None:
    """Measure, write the JSON after each contestant, print the table and draw the plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "target", nargs="?", default="llama-8b", help="a URL, a shape (llama-8b, tiny), a directory or a hub id"
    )
    parser.add_argument("--peers", default="", help="of vllm, transformers and NAME=URL, with commas")
    parser.add_argument(
        "--suites",
        default="latency,throughput",
        help="of latency, throughput, fairness (streams beside a long prompt), reuse",
    )
    parser.add_argument("--lengths", default="4k,16k,32k,64k,128k", help="prompt lengths in tokens, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="rounds at each length")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer in the latency suite")
    parser.add_argument("--batches", default="16x16k,64x4k,4x64k", help="batches that are sent at once, with commas")
    parser.add_argument("--batch-tokens", type=int, default=128, help="tokens of each answer of a batch")
    parser.add_argument("--long-prompt", default="128k", help="tokens of the long prompt of fairness and reuse")
    parser.add_argument("--serve-flags", default="", help="flags of `longreach serve`, in one argument")
    parser.add_argument("--vllm-packages", type=Path, help="a directory with vLLM, if it is not installed")
    parser.add_argument("--vllm-flags", default="", help="flags of vLLM's server, in one argument")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument("--plot", type=Path, help="draw TTFT and ITL by length as a PNG here")
    arguments = parser.parse_args()
    sizes = ("lengths", "repeats", "max_tokens", "batches", "batch_tokens", "long_prompt")

    def save(result: dict[str, Any]) -> None:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    try:
        if arguments.plot is not None:
            require("matplotlib", "bench")
        result = compare(
            arguments.target,
            names(arguments.peers),
            names(arguments.suites),
            load_of(**{name: getattr(arguments, name) for name in sizes}),
            lambda line: print(line, file=sys.stderr),
            flags=shlex.split(arguments.serve_flags),
            vllm_packages=arguments.vllm_packages,
            vllm_flags=shlex.split(arguments.vllm_flags),
            save=save,
        )
    except ValueError as error:
        parser.error(str(error))
    print(report.table(result))
    if arguments.plot is not None:
        report.draw(result, arguments.plot)


if __name__ == "__main__":
    main()
