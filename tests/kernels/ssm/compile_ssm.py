"""Compile the kernels of Mamba-2's recurrence for GPUs that are not there, and print the shared memory of each as JSON.

A process of its own, as `tests.kernels.compile_portable` says. Arguments: a compute capability and a launch of
`LAUNCHES`, such as `90:scan`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from longreach_kernels.delta import gated_norm, norm_kernel
from longreach_kernels.ssm import launch, ssd_scan

from tests.kernels import compile_portable
from tests.kernels.delta.compile_delta import batch

_USED = (launch, norm_kernel)  # imported before a GPU is pretended
_HALF = torch.bfloat16


def scan(dtype: torch.dtype, state_size: int, dim: int, *, limits: tuple[float, float] = (0.0, float("inf"))) -> None:
    """Four heads of two groups."""
    x = torch.empty(132, 4, dim, dtype=dtype)
    b, dt, numbers = torch.empty(132, 2, state_size, dtype=dtype), torch.empty(132, 4, dtype=dtype), torch.empty(4)
    skip = None if dtype == torch.float16 else numbers
    states = torch.empty(4, 4, state_size, dim)
    ssd_scan(x, b, b, dt, numbers, skip, numbers, states, batch(), dt_limits=limits, backend="triton")


def norm() -> None:
    """After the states, by group of 4096 channels."""
    x = torch.empty(132, 2, 4096, dtype=_HALF)
    gated_norm(x, x, torch.empty(2, 4096, dtype=_HALF), 1e-6, gate_first=True, backend="triton")


LAUNCHES: dict[str, Callable[[], None]] = {
    "scan": lambda: scan(_HALF, 128, 64),
    "scan, fp16": lambda: scan(torch.float16, 64, 80, limits=(0.001, 0.5)),
    "scan, 256": lambda: scan(_HALF, 256, 64),
    "scan, 256, fp32": lambda: scan(torch.float32, 256, 128),
    "norm": norm,
}


def main(arguments: list[str]) -> dict[str, dict[str, int]]:
    """Bytes of shared memory, by argument and kernel."""
    compiler = compile_portable.pretend()
    for compiler.launch in arguments:
        arch, name = compiler.launch.split(":")
        compile_portable._Driver.arch = int(arch)
        LAUNCHES[name]()
    return compiler.shared


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
