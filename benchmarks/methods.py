"""Attention methods of the literature beside ours: time, memory, bytes, error, and recall in a pretrained model.

    python -m benchmarks.methods --lengths 1024,4096,16384 --out result.json

Every method computes the same random inputs, forward, and forward and backward; its output is compared with exact
attention in float64, on those inputs and on the heads of the embedded model; and those that can stand in a pretrained
model answer the questions of `training.recall` there. What does not fit in memory is a result. --dram joins what
Nsight Compute counted (`attention_methods/dram.py` has the command).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from longreach.bench.sizes import whole_numbers
from longreach.bench.summary import environment

from benchmarks.attention_methods import dram
from benchmarks.attention_methods.catalogue import Method, chosen
from benchmarks.attention_methods.measure import Shape, row
from benchmarks.attention_methods.pretrained import Pretrained
from benchmarks.attention_methods.tables import table

LENGTHS = ",".join(str(1024 << i) for i in range(8))
LATE = "not run: out of time"


def parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--lengths", default=LENGTHS, help="tokens, multiples of 128")
    parser.add_argument("--methods", help="names, with commas; all by default")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--model-length", type=int, default=8192, help="tokens whose heads errors are measured on")
    parser.add_argument("--recall-lengths", default="4096,16384", help="tokens of the prompts; empty: no recall")
    parser.add_argument("--recall-count", type=int, default=2, help="prompts of each task and length")
    parser.add_argument("--seconds", type=float, default=150, help="no further length is timed after so many")
    parser.add_argument("--dram", type=Path, help="folder of Nsight Compute's CSV files")
    parser.add_argument("--profile", metavar="METHOD", help="run one forward pass for a profiler, and nothing else")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    return parser, parser.parse_args()


def timed(methods: tuple[Method, ...], lengths: tuple[int, ...], shape: Shape, deadline: float) -> list[dict[str, Any]]:
    """A row for each length and method; lengths that would begin after the deadline are not run, and say so."""
    rows = []
    for length in lengths:
        late = time.monotonic() > deadline
        for method in methods:
            if late and method.attend is not None:
                failed = {"failed": LATE}
                found = row(replace(method, attend=None), length, shape) | {"forward": failed, "both": failed}
            else:
                found = row(method, length, shape)
            rows.append(found)
            print(line(found), file=sys.stderr, flush=True)
    return rows


def line(found: dict[str, Any]) -> str:
    """A row as text."""
    parts = [f"{found['tokens']:>7,} {found['method']:<26}"]
    for name in ("forward", "both"):
        if name in found:
            part = found[name]
            parts.append(f"{name} " + (part.get("failed") or f"{part['ms']:.3f} ms {part.get('gib', 0):.2f} GiB"))
    if "error" in found:
        parts.append(f"error {found['error']:.2e}")
    return ", ".join(parts)


def in_the_model(
    methods: tuple[Method, ...], model_length: int, lengths: tuple[int, ...], count: int, device: torch.device
) -> dict[str, Any]:
    """``model``: errors on the embedded model's heads; ``recall``: its answers under each method."""
    pretrained = Pretrained(device, lengths or (model_length,), count)
    errors = {m.name: pretrained.errors(m, model_length) for m in methods if m.attend is not None}
    recall = []
    for length in lengths:
        prompts = pretrained.prompts(length)
        for method in (m for m in methods if m.pretrained):
            recall.append(pretrained.recall(method, length, prompts))
            print({k: v for k, v in recall[-1].items() if k != "right_by_task"}, file=sys.stderr, flush=True)
    return {"model": {"tokens": model_length, "errors": errors}, "recall": recall}


def main() -> None:
    """Measure, print the tables, and write the JSON."""
    parser, arguments = parsed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(arguments.heads, arguments.head_dim, device)
    try:
        lengths = whole_numbers("--lengths", arguments.lengths)
        recall_lengths = whole_numbers("--recall-lengths", arguments.recall_lengths)
        if not lengths or any(length < 128 or length % 128 for length in lengths):
            raise ValueError(f"--lengths: needs multiples of 128, got {arguments.lengths!r}")
        methods = chosen(arguments.profile or arguments.methods)
        if arguments.profile:
            dram.profiled(methods[0], lengths[0], shape)
            return
        result: dict[str, Any] = {
            "environment": environment(),
            "shape": {"heads": shape.heads, "head_dim": shape.head_dim, "dtype": str(shape.dtype).partition(".")[2]},
            "methods": [{"name": method.name, "paper": method.paper, "causal": method.causal} for method in methods],
            "rows": timed(methods, lengths, shape, time.monotonic() + arguments.seconds),
            "model": {"tokens": arguments.model_length, "errors": {}},
            "recall": [],
        }
        if arguments.dram is not None and not dram.join(result["rows"], arguments.dram):
            raise ValueError(f"--dram: no file of {arguments.dram} is named METHOD-TOKENS.csv for a row")
        save(result, arguments.out)  # what was timed is not lost if the rest is cut short
        result |= in_the_model(methods, arguments.model_length, recall_lengths, arguments.recall_count, device)
    except ValueError as error:
        parser.error(str(error))
    print(table(result))
    save(result, arguments.out)


def save(result: dict[str, Any], path: Path | None) -> None:
    """Write the result as JSON, if somewhere."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
