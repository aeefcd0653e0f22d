"""Bytes that Nsight Compute counted between the GPU and its memory, joined into the rows of a result.

There is one file for each method and length, METHOD-TOKENS.csv, with spaces in METHOD as underscores, made by

    ncu --csv --print-units base --metrics dram__bytes_read.sum,dram__bytes_write.sum --profile-from-start off \\
        python -m benchmarks.methods --profile longreach --lengths 16384 > dram/longreach-16384.csv
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_methods.catalogue import Method
from benchmarks.attention_methods.measure import Shape, gaussian

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def counted_bytes(path: Path) -> int:
    """The bytes read and written by all kernels of a profile.

    Raises:
        ValueError: the file is no such CSV, or its units are not bytes.
    """
    lines = path.read_text().splitlines()
    start = next((i for i, line in enumerate(lines) if '"Metric Name"' in line), None)
    if start is None:
        raise ValueError(f'{path}: has no column "Metric Name"; write it with ncu --csv --metrics {",".join(METRICS)}')
    total, seen = 0, set()
    for row in csv.DictReader(lines[start:]):
        if row["Metric Name"] not in METRICS:
            continue
        if row["Metric Unit"] != "byte":
            raise ValueError(f"{path}: {row['Metric Name']} is in {row['Metric Unit']}; add --print-units base")
        seen.add(row["Metric Name"])
        total += round(float(row["Metric Value"].replace(",", "")))
    if seen != set(METRICS):
        raise ValueError(f"{path}: needs {' and '.join(METRICS)}, has {', '.join(sorted(seen)) or 'neither'}")
    return total


def join(rows: list[dict[str, Any]], folder: Path) -> int:
    """Give rows that have a profile in the folder their ``dram_bytes``; how many.

    Raises:
        ValueError: there is no such folder, or a file in it is no profile.
    """
    if not folder.is_dir():
        raise ValueError(f"--dram: {folder} is no folder of profiles")
    joined = 0
    for row in rows:
        path = folder / f"{row['method'].replace(' ', '_')}-{row['tokens']}.csv"
        if path.exists():
            row["dram_bytes"] = counted_bytes(path)
            joined += 1
    return joined


def profiled(method: Method, length: int, shape: Shape) -> None:
    """One forward pass between the marks that ``ncu --profile-from-start off`` heeds, after one that is not counted.

    Raises:
        ValueError: the method has no form to run, or there is no GPU.
    """
    if method.attend is None or shape.device.type != "cuda":
        raise ValueError(f"--profile: needs a GPU and a method that runs, got {method.name} on {shape.device}")
    q, k, v = gaussian(length, shape)
    with torch.no_grad():
        method.attend(q, k, v)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        method.attend(q, k, v)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
