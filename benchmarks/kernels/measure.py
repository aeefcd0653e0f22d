"""Our attention kernels, their peers and the machine's own ceilings, all in one run."""

from __future__ import annotations

import datetime
import importlib.metadata
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.kernels.cases import Case
from benchmarks.kernels.peers import Peer, Run, make, ours

Report = Callable[[str], object]

_TURNS = 5
_WARMUP_MS = 20
_BETWEEN_MS = 8
_TURN_MS = 30


def measure(
    cases: Iterable[Case],
    backends: list[str],
    peers: list[str],
    report: Report = print,
    save: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Time every case with every backend and peer; medians, on the current GPU. After each case `save` is given the
    result so far, so that a run which is cut short leaves what it measured.

    Returns what goes to JSON: the environment, the `ceilings.ceilings` (TFLOP/s and GB/s), and a row a case with the
    milliseconds of each implementation that can compute it.

    Raises:
        ValueError: there is no GPU, or a peer is not here.
    """
    if not torch.cuda.is_available():
        raise ValueError("benchmarks.kernels needs a CUDA GPU: it times GPU kernels")
    contestants = [ours(backend) for backend in backends] + [make(name) for name in peers]
    from benchmarks.kernels.ceilings import ceilings as measure_ceilings

    ceilings = measure_ceilings()
    report(
        "ceilings: matmul {matmul_tflops:.0f} TFLOP/s, copy {copy_gbs:.0f}, read {read_gbs:.0f} GB/s".format(**ceilings)
    )
    rows: list[dict[str, Any]] = []
    result = {"environment": _environment(), "ceilings": ceilings, "rows": rows}
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "kind": case.kind, "flops": case.flops, "kv_bytes": case.kv_bytes}
        row["ms"] = _time(contestants, case, report)
        rows.append(row)
        report(line(row))
        if save is not None:
            save(result)
    return result


def line(row: dict[str, Any]) -> str:
    """One row as text: TFLOP/s, or GB/s of keys and values for a decode."""
    decode = row["kind"] == "decode"
    work, unit = (row["kv_bytes"] / 1e6, "GB/s") if decode else (row["flops"] / 1e9, "TFLOP/s")
    figures = ", ".join(f"{name} {work / ms:.0f}" for name, ms in row["ms"].items())
    return f"{row['case']:<44} {figures} {unit}"


def share_of_ceiling(row: dict[str, Any], name: str, ceilings: dict[str, float]) -> float:
    """Speed of `name` in a row as a share of the machine's: bytes against reading, operations against its product."""
    if row["kind"] == "decode":
        return row["kv_bytes"] / 1e6 / row["ms"][name] / ceilings.get("read_gbs", ceilings["copy_gbs"])
    return row["flops"] / 1e9 / row["ms"][name] / ceilings["matmul_tflops"]


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table: speed, and ours as a fraction of the ceiling."""
    names = sorted(
        {name for row in result["rows"] for name in row["ms"]}, key=lambda name: (name[:9] != "longreach", name)
    )
    lines = [["case", "unit", *names, "of the ceiling"], ["---", "---", *["---:"] * (len(names) + 1)]]
    for row in result["rows"]:
        decode = row["kind"] == "decode"
        work, unit = (row["kv_bytes"] / 1e6, "GB/s") if decode else (row["flops"] / 1e9, "TFLOP/s")
        own = (name for name in row["ms"] if name.startswith("longreach"))
        best = max((share_of_ceiling(row, name, result["ceilings"]) for name in own), default=0.0)
        speeds = [f"{work / row['ms'][name]:.0f}" if name in row["ms"] else "" for name in names]
        lines.append([row["case"], unit, *speeds, f"{best:.2f}"])
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    ceilings = "matmul {matmul_tflops:.0f} TFLOP/s, copy {copy_gbs:.0f} GB/s".format(**result["ceilings"])
    if "read_gbs" in result["ceilings"]:
        ceilings += f", read {result['ceilings']['read_gbs']:.0f} GB/s"
    caption = f"{where['device']}; ceilings measured in the same run: {ceilings}; {versions}; {where['date']}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def _time(contestants: list[Peer], case: Case, report: Report) -> dict[str, float]:
    """Median milliseconds of each that can compute the case. They take turns, for a GPU that has become warm is slower:
    whoever came first would win."""
    from benchmarks.kernels.ceilings import median_ms

    runs: dict[str, Run] = {}
    for peer in contestants:
        try:
            run = peer.prepare(case)
            if run is not None:
                median_ms(run, _WARMUP_MS, _TURN_MS)
                runs[peer.name] = run
        except Exception as error:  # noqa: BLE001 - one contestant's failure is a result, and the others go on
            report(f"{case.name}: {peer.name} failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    turns = [{name: median_ms(run, _BETWEEN_MS, _TURN_MS) for name, run in runs.items()} for _ in range(_TURNS)]
    runs.clear()
    torch.cuda.empty_cache()
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def _environment() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    versions["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "device": torch.cuda.get_device_name(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
