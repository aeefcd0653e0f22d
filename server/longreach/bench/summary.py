"""What every benchmark writes down: percentiles of its figures, and what they were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from pathlib import Path


def summarise(values: list[float]) -> dict[str, float]:
    """p50, p90, p99 (nearest rank), mean and count of some figures."""
    ordered = sorted(values)

    def percentile(percent: int) -> float:
        return ordered[-(-percent * len(ordered) // 100) - 1]

    return {
        "p50": percentile(50),
        "p90": percentile(90),
        "p99": percentile(99),
        "mean": statistics.fmean(ordered),
        "count": len(ordered),
    }


# NVIDIA's driver has one of these, the second in Windows' subsystem for Linux.
_DRIVERS = Path("/dev/nvidiactl"), Path("/dev/dxg")


def _gpu() -> str | None:
    """The first GPU's name. Without a driver torch is not asked: its import takes seconds."""
    if not any(driver.exists() for driver in _DRIVERS):
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def environment() -> dict[str, object]:
    """The GPU or CPU, the versions that matter, and today's date (UTC)."""
    packages = ("longreach", "torch", "triton", "transformers")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree that is only on the path
            versions[name] = "not installed"
    return {
        "device": _gpu() or f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
