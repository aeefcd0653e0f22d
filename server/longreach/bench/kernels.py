"""`longreach bench kernels`: our attention kernels, their peers and the machine's own ceilings, all in one run."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from .cases import Case
from .peers import Peer, Run, make, ours

Report = Callable[[str], object]

_WARMUP_MS = 30
_MEASURE_MS = 120
_COPY_BYTES = 4 << 30
_MATMUL_SIZE = 8192


def measure(cases: Iterable[Case], backends: list[str], peers: list[str], report: Report = print) -> dict[str, Any]:
    """Time every case with every backend and peer; medians, on the current GPU.

    Returns what goes to JSON: the environment, the ceilings (bf16 matrix product in TFLOP/s, copy in GB/s), and a row a
    case with the milliseconds of each implementation that can compute it.

    Raises:
        ValueError: there is no GPU, or a peer is not here.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA GPU: it times GPU kernels")
    contestants = [ours(backend) for backend in backends] + [make(name) for name in peers]
    ceilings = {"matmul_tflops": _matmul_tflops(), "copy_gbs": _copy_gbs()}
    report(f"ceilings: matmul {ceilings['matmul_tflops']:.0f} TFLOP/s, copy {ceilings['copy_gbs']:.0f} GB/s")
    rows = []
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "kind": case.kind, "flops": case.flops, "kv_bytes": case.kv_bytes}
        row["ms"] = {peer.name: ms for peer in contestants if (ms := _time(peer, case, report)) is not None}
        rows.append(row)
        report(line(row))
    return {"environment": _environment(), "ceilings": ceilings, "rows": rows}


def line(row: dict[str, Any]) -> str:
    """One row as text: TFLOP/s, or GB/s of keys and values for a decode."""
    decode = row["kind"] == "decode"
    work, unit = (row["kv_bytes"] / 1e6, "GB/s") if decode else (row["flops"] / 1e9, "TFLOP/s")
    figures = ", ".join(f"{name} {work / ms:.0f}" for name, ms in row["ms"].items())
    return f"{row['case']:<44} {figures} {unit}"


def share_of_ceiling(row: dict[str, Any], name: str, ceilings: dict[str, float]) -> float:
    """Speed of `name` in a row as a share of the machine's: bytes against its copy, operations against its product."""
    if row["kind"] == "decode":
        return row["kv_bytes"] / 1e6 / row["ms"][name] / ceilings["copy_gbs"]
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
    caption = f"{where['device']}; ceilings measured in the same run: {ceilings}; {versions}; {where['date']}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def _time(peer: Peer, case: Case, report: Report) -> float | None:
    try:
        run = peer.prepare(case)
        return None if run is None else _median_ms(run)
    except Exception as error:  # noqa: BLE001 - one contestant's failure is a result, and the others go on
        report(f"{case.name}: {peer.name} failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return None
    finally:
        torch.cuda.empty_cache()


def _median_ms(run: Run) -> float:
    from triton.testing import do_bench

    return cast("float", do_bench(run, warmup=_WARMUP_MS, rep=_MEASURE_MS, return_mode="median"))


def _matmul_tflops() -> float:
    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * _MATMUL_SIZE**3 / _median_ms(lambda: a @ b) / 1e9


def _copy_gbs() -> float:
    source = torch.randint(0, 255, (_COPY_BYTES,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _median_ms(lambda: target.copy_(source)) / 1e6


def _environment() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    versions["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "device": torch.cuda.get_device_name(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
