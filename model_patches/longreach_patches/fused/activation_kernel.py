"""The Triton form of `activation`."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import cdiv, launch
from torch import Tensor

_BLOCK = 2048


@triton.jit
def silu(x):
    """x * sigmoid(x), fp32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_mul_kernel(GateUp, Out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of a row, T)."""
    row = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < WIDTH
    gate = tl.load(GateUp + row * 2 * WIDTH + offs, mask=inside).to(tl.float32)
    up = tl.load(GateUp + row * 2 * WIDTH + WIDTH + offs, mask=inside).to(tl.float32)
    tl.store(Out + row * WIDTH + offs, (silu(gate) * up).to(Out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `activation.silu_mul`, rounded once."""
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], width)
    launch(_silu_mul_kernel, (cdiv(width, _BLOCK), gate_up.shape[0]), gate_up, out, WIDTH=width, BLOCK=_BLOCK)
    return out
