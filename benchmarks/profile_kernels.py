"""What limits the kernels: their traffic and where their cycles go, by Nsight Compute's counters.

    ncu --profile-from-start off --clock-control none --csv --page raw --section SpeedOfLight \
        --section ComputeWorkloadAnalysis --section WarpStateStats \
        --metrics dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum,lts__t_bytes.sum \
        python -m benchmarks.profile_kernels run > profile.csv
    python -m benchmarks.profile_kernels read profile.csv --like kernels.json --out benchmarks/results/profile-h200.json

`run` launches each case once between the profiler's marks, after a run that compiles, with a cold L2 cache. `read` sums
what its kernels did; `--like` is a result of `benchmarks.kernels` from the same machine, which says what that was.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from longreach_kernels import Full, attention
from longreach_kernels.analysis import io_model

from benchmarks.kernels import peers
from benchmarks.kernels.cases import Case

HEADS, HEAD_DIM = 8, 128
LENGTHS = (1024, 2048, 4096, 8192, 16384)
ROWS = 128  # of a query tile
_MARK = 1000  # a case begins with a fill of so many doubles, which nothing else does

_BYTES = {"dram_read": "dram__bytes_read.sum", "dram_written": "dram__bytes_write.sum", "l2": "lts__t_bytes.sum"}
_SHARES = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exp": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
_STALL = "smsp__average_warps_issue_stalled_"

Run = Callable[[], Any]


def _case(case: Case, name: str = "hopper") -> Callable[[], Run]:
    def make() -> Run:
        run = (peers.ours(name) if name in ("hopper", "triton") else peers.make(name)).prepare(case)
        assert run is not None, case.name
        return run

    return make


def _inputs(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(1, HEADS, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


def _standard(n: int) -> Callable[[], Run]:
    def make() -> Run:
        q, k, v = _inputs(n)
        return lambda: torch.softmax((q @ k.mT) * HEAD_DIM**-0.5, -1) @ v

    return make


def _flash(n: int) -> Callable[[], Run]:
    def make() -> Run:
        q, k, v = _inputs(n)
        return lambda: attention(q, k, v, Full(), backend="hopper")

    return make


_BACKWARD = Case("backward", 1, 16384, Hq=16, Hkv=16)
CASES: dict[str, Callable[[], Run]] = {
    "d64 full ours": _case(Case("forward", 1, 16384, D=64, mask=Full())),
    "d64 full fa3": _case(Case("forward", 1, 16384, D=64, mask=Full()), "fa3"),
    "fp8 forward": _case(Case("forward", 1, 16384, fp8=True)),
    "bf16 forward": _case(Case("forward", 1, 16384)),
    "bf16 forward triton": _case(Case("forward", 1, 16384), "triton"),
    "backward ours": _case(_BACKWARD),
    "backward triton": _case(_BACKWARD, "triton"),
    "decode bf16": _case(Case("decode", 8, 32768)),
    "decode fa3": _case(Case("decode", 8, 32768), "fa3"),
    "decode fp8": _case(Case("decode", 8, 32768, fp8=True)),
    **{f"{name} {n}": make(n) for n in LENGTHS for name, make in (("standard", _standard), ("flash", _flash))},
}


def run_all() -> None:
    """Launch every case between marks, and say which it was."""
    from torch.cuda import profiler

    for index, (name, make) in enumerate(CASES.items()):
        run = make()
        run()
        torch.cuda.synchronize()
        cold = torch.empty(1 << 27, device="cuda").zero_()  # nothing of the case is left in the L2 cache
        mark = torch.empty(_MARK + index, dtype=torch.float64, device="cuda")
        torch.cuda.synchronize()
        profiler.start()
        mark.fill_(1.0)
        run()
        torch.cuda.synchronize()
        profiler.stop()
        print("CASE", index, name, flush=True)
        del run, cold
        torch.cuda.empty_cache()


def read(lines: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Kernels by case, from what `ncu` printed: name, milliseconds, bytes, shares of peak, and the commonest stall.

    Raises:
        ValueError: there is no table, or it has other cases than were announced.
    """
    rows = list(csv.reader(lines))
    names = [row[0].split(" ", 2)[2] for row in rows if row and row[0].startswith("CASE ")]
    start = next((at for at, row in enumerate(rows) if "Kernel Name" in row), None)
    if start is None:
        raise ValueError("no table of kernels: was this printed by ncu --csv --page raw?")
    header = rows[start]
    cases: list[list[dict[str, Any]]] = []
    for row in rows[start + 2 :]:  # the first is of units
        if len(row) != len(header):
            continue
        fields = dict(zip(header, row, strict=True))
        kernel = fields["Kernel Name"]
        if "FillFunctor<double>" in kernel:
            cases.append([])
        elif cases and "FillFunctor" not in kernel:
            cases[-1].append(_kernel(kernel, fields))
    if len(cases) != len(names):
        raise ValueError(f"{len(names)} cases were announced and {len(cases)} profiled")
    return dict(zip(names, cases, strict=True))


def _kernel(name: str, fields: dict[str, str]) -> dict[str, Any]:
    def number(field: str) -> float:
        return float(fields[field].replace(",", "") or 0)

    stalls = {
        field.removeprefix(_STALL).removesuffix("_per_issue_active.ratio"): number(field)
        for field in fields
        if field.startswith(_STALL) and field.endswith("_per_issue_active.ratio")
    }
    stalls.pop("selected", None)
    return {
        "name": name[:60],
        "ms": number("gpu__time_duration.sum") / 1e6,
        **{key: int(number(field)) for key, field in _BYTES.items()},
        **{key: round(number(field), 1) for key, field in _SHARES.items()},
        "stall": max(stalls, key=lambda key: stalls[key]) if stalls else "",
    }


def traffic(cases: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """For each length, bytes that the IO model predicts and that were counted, of all heads."""
    for n in LENGTHS:
        if f"standard {n}" not in cases or f"flash {n}" not in cases:
            continue
        standard, flash = cases[f"standard {n}"], cases[f"flash {n}"]
        # Torch scales the scores in a kernel of its own, which reads and writes them once more.
        scaling = 2 * 2 * n * n
        yield {
            "tokens": n,
            "standard_predicted": HEADS * (io_model.standard(n, HEAD_DIM).total + scaling),
            "standard_dram": sum(kernel["dram_read"] + kernel["dram_written"] for kernel in standard),
            "flash_predicted": HEADS * io_model.flash2(n, HEAD_DIM, io_model.Tiles(ROWS, ROWS)).total,
            "flash_l2": sum(kernel["l2"] for kernel in flash),
            "flash_dram": sum(kernel["dram_read"] + kernel["dram_written"] for kernel in flash),
            "least": HEADS * io_model.lower_bound(n, HEAD_DIM, 228 << 10),
        }


def traffic_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: predicted and counted megabytes by length."""
    names = ("standard_predicted", "standard_dram", "flash_predicted", "flash_l2", "flash_dram", "least")
    titles = ("standard: predicted", "from DRAM", "flash: predicted", "from L2", "from DRAM", "least possible")
    lines = [["tokens", *titles], ["---:"] * 7]
    lines += [[f"{row['tokens']:,}", *(f"{row[name] / 1e6:,.0f}" for name in names)] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def limits_table(cases: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: the longest kernel of each case that is not about traffic, and what it kept busy."""
    lines = [["case", "ms", "tensor cores", "exp unit", "issue slots", "DRAM", "DRAM bytes (MB)", "commonest stall"]]
    lines.append(["---", *["---:"] * 6, "---"])
    for name, kernels in cases.items():
        if name.split()[0] in ("standard", "flash"):
            continue
        kernel = max(kernels, key=lambda kernel: kernel["ms"])
        shares = [f"{kernel[key]:.0f} %" for key in ("tensor", "exp", "issue", "dram")]
        moved = (kernel["dram_read"] + kernel["dram_written"]) / 1e6
        lines.append([name, f"{kernel['ms']:.2f}", *shares, f"{moved:,.0f}", kernel["stall"].replace("_", " ")])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def table(result: dict[str, Any]) -> str:
    """Both tables, and what they were measured on."""
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    caption = f"Megabytes for {HEADS} heads of {HEAD_DIM}, bfloat16. {where['device']}; {versions}; {where['date']}."
    return f"{traffic_table(result['traffic'])}\n\n{limits_table(result['profiles'])}\n\n{caption}\n"


def main() -> None:
    """Run the cases, or read what the profiler said of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run")
    reading = commands.add_parser("read")
    reading.add_argument("profile", type=Path)
    reading.add_argument("--like", type=Path, required=True)
    reading.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "run":
        run_all()
        return
    cases = read(args.profile.read_text().splitlines())
    environment = json.loads(args.like.read_text())["environment"]
    result = {"environment": environment, "profiles": cases, "traffic": list(traffic(cases))}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
