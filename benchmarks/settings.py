"""One model by our own server under several settings, one after the other in one run: TTFT and ITL by prompt length.

    python -m benchmarks.settings llama-8b --lengths 4k,32k,128k --out result.json \\
        "1 GPU=" "2 GPUs=--tensor-parallel-size 2"

A setting is NAME=FLAGS of `longreach serve`. The table and the JSON are those of `benchmarks.compare`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from longreach.bench.load import latency
from longreach.bench.report import table
from longreach.bench.sizes import load_of
from longreach.bench.suites import run


def main() -> None:
    """Measure each setting, write JSON after each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a shape, a directory or a hub id, as `benchmarks.compare` takes it")
    parser.add_argument("settings", nargs="+", metavar="NAME=FLAGS")
    parser.add_argument("--lengths", default="4k,16k")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = load_of(lengths=args.lengths, repeats=args.repeats, max_tokens=args.max_tokens)
    result: dict[str, Any] = {}
    for setting in args.settings:
        name, equals, flags = setting.partition("=")
        if not equals:
            parser.error(f"give NAME=FLAGS, got {setting!r}")
        print(f"{name}: {flags or 'defaults'}", file=sys.stderr)
        found = run(args.target, {"latency": latency}, load, _report, shlex.split(flags))
        [measured] = found["runs"]
        result = {**found, "runs": [*result.get("runs", []), measured | {"name": name, "flags": flags}]}
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def _report(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
