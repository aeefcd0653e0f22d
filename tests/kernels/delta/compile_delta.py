"""Compile the kernels of the gated delta rule for GPUs that are not there, and print the shared memory of each as JSON.

A process of its own, as `tests.kernels.compile_portable` says. Arguments: a compute capability and a launch of
`LAUNCHES`, such as `90:rule`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from longreach_kernels.delta import (
    StateBatch,
    convolution_kernel,
    decay_and_beta,
    gated_delta_rule,
    gated_norm,
    gates_kernel,
    launch,
    norm_kernel,
    short_convolution,
)

from tests.kernels import compile_portable

_USED = (launch, convolution_kernel, gates_kernel, norm_kernel)  # imported before a GPU is pretended
_HALF = torch.bfloat16


def batch() -> StateBatch:
    """Two single tokens and a prompt of 130."""
    slots = torch.tensor([-1, 0, 1])
    return StateBatch(torch.tensor([0, 1, 2, 132], dtype=torch.int32), slots, slots + 1, 130, num_decodes=2)


def rule(dtype: torch.dtype, key_dim: int, dim: int, normalise_qk: float | None = 1e-6) -> None:
    """Two value heads of a key head."""
    q = torch.empty(132, 1, key_dim, dtype=dtype)
    v, numbers = torch.empty(132, 2, dim, dtype=dtype), torch.empty(132, 2)
    states = torch.empty(4, 2, key_dim, dim)
    gated_delta_rule(q, q, v, numbers, numbers, states, batch(), normalise_qk=normalise_qk, backend="triton")


def around(dtype: torch.dtype) -> None:
    """What comes before and after."""
    x = torch.empty(132, 2, 128, dtype=dtype)
    channels, states = x.view(132, 256), torch.empty(4, 256, 3, dtype=dtype)
    bias = channels[0] if dtype == torch.float32 else None
    short_convolution(channels, torch.empty(4, 256, dtype=dtype).T, bias, states, batch(), backend="triton")
    decay_and_beta(channels[:, :32], channels[:, 32:64], *torch.empty(2, 32), backend="triton")
    for gate in (x, None):
        gated_norm(x, gate, torch.empty(128, dtype=dtype), 1e-6, backend="triton")


LAUNCHES: dict[str, Callable[[], None]] = {
    "rule": lambda: rule(_HALF, 128, 128),
    "rule, fp16": lambda: rule(torch.float16, 96, 192),
    "rule, fp32": lambda: rule(torch.float32, 128, 128, None),
    "rule, 256": lambda: rule(_HALF, 256, 256),
    "rule, 256, fp32": lambda: rule(torch.float32, 256, 256),
    "around": lambda: around(_HALF),
    "around, fp32": lambda: around(torch.float32),
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
