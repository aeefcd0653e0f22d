"""What is read of a profiler's output."""

from __future__ import annotations

from types import ModuleType

import pytest

from benchmarks import profile_kernels as profile


def _output(module: ModuleType, kernels: list[tuple[str, float, str]]) -> list[str]:
    stalls = [
        f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in ("selected", "wait", "mio")
    ]
    columns = ["Kernel Name", "gpu__time_duration.sum", *module._BYTES.values(), *module._SHARES.values(), *stalls]
    lines = ["CASE 0 bf16 forward", "CASE 1 standard 1024", ",".join(columns), "," * (len(columns) - 1)]
    for name, nanoseconds, read in kernels:
        lines.append(
            ",".join([f'"{name}"', str(nanoseconds), f'"{read}"', "50", "70", "85.04", "44", "35", "4", "9", "1", "2"])
        )
    return lines


def test_kernels_are_read_by_case() -> None:
    kernels = [
        ("fill FillFunctor<double>", 1e3, "0"),
        ("fill FillFunctor<int>", 1e3, "0"),
        ("forward_kernel", 2.5e6, "1,000,000"),
        ("fill FillFunctor<double>", 1e3, "0"),
        ("scores", 1e6, "300"),
        ("softmax", 1e6, "400"),
    ]
    cases = profile.read(_output(profile, kernels))
    assert list(cases) == ["bf16 forward", "standard 1024"]
    [forward] = cases["bf16 forward"]
    assert (forward["ms"], forward["dram_read"], forward["tensor"], forward["stall"]) == (2.5, 1_000_000, 85.0, "mio")
    assert [kernel["dram_read"] for kernel in cases["standard 1024"]] == [300, 400]
    assert "| bf16 forward | 2.50 | 85 % |" in profile.limits_table(cases)
    assert "standard" not in profile.limits_table(cases)


def test_output_that_is_not_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cases were announced and 1 profiled"):
        profile.read(_output(profile, [("fill FillFunctor<double>", 1e3, "0")]))
    with pytest.raises(ValueError, match="ncu --csv --page raw"):
        profile.read(["CASE 0 bf16 forward"])


def test_traffic_is_summed_beside_the_model() -> None:
    def kernel(read: int) -> dict[str, int]:
        return {"dram_read": read, "dram_written": 5, "l2": 7}

    [row] = profile.traffic({"standard 1024": [kernel(100), kernel(200)], "flash 1024": [kernel(10)]})
    assert (row["tokens"], row["standard_dram"], row["flash_dram"], row["flash_l2"]) == (1024, 310, 15, 7)
    assert row["least"] == 8 * 4 * 1024 * 128 * 2
    # Scores written, scaled (read and written), read for the softmax, written, and read: six times, and Q, K, V, O.
    assert row["standard_predicted"] == 8 * 2 * (6 * 1024**2 + 4 * 1024 * 128)
