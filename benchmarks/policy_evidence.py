"""Answers of `longreach bench recall --suite ruler-like` from a shared GPU, with times of runs that were alone.

    python -m benchmarks.policy_evidence answers.json --times alone.json --name gemma-3-270m --out result.json

Answers of several models are measured at the same time, which disturbs the times of each. A short run of the same
settings, alone on the machine, has the times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from longreach.bench.policy_sweep import DENSE


def with_times(result: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """The result with the times to the first token of `alone`, where that has the setting at the length; no others.

    Raises:
        ValueError: the two ran on different devices.
    """
    if result["environment"]["device"] != alone["environment"]["device"]:
        raise ValueError("--times: its device is another one: measure both on one kind of machine")
    seconds = {(row["setting"], row["tokens"]): row["ttft_s"] for row in alone["curves"]}
    rows = []
    for row in result["curves"]:
        mine, dense = seconds.get((row["setting"], row["tokens"])), seconds.get((DENSE, row["tokens"]))
        share = round(mine / dense, 3) if mine and dense and row["setting"] != DENSE else None
        rows.append(row | {"ttft_s": mine, "ttft_of_dense": share})
    return result | {"curves": rows}


def main() -> None:
    """Write the joined result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("answers", type=Path, help="the result whose answers count")
    parser.add_argument("--times", type=Path, help="the result whose times count")
    parser.add_argument("--name", required=True, help="what the model is called")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    arguments = parser.parse_args()
    result = json.loads(arguments.answers.read_text())
    try:
        if arguments.times is not None:
            result = with_times(result, json.loads(arguments.times.read_text()))
    except ValueError as error:
        parser.error(str(error))
    result["model"] = {"name": arguments.name}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
