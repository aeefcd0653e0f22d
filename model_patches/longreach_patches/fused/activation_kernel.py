"""The Triton form of `activation`."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import cdiv, launch
from torch import Tensor

from longreach_patches.fused.activation import Activation

_BLOCK = 2048


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """x * sigmoid(x), or GELU with a hyperbolic tangent, fp32: 1 + tanh(y) is 2 sigmoid(2 y)."""
    at = x
    if ACTIVATION == "gelu_tanh":
        at = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    return x / (1.0 + tl.exp(-at))


@triton.jit
def _gated_kernel(GateUp, Out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Grid (blocks of a row, T)."""
    row = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < WIDTH
    gate = tl.load(GateUp + row * 2 * WIDTH + offs, mask=inside).to(tl.float32)
    up = tl.load(GateUp + row * 2 * WIDTH + WIDTH + offs, mask=inside).to(tl.float32)
    tl.store(Out + row * WIDTH + offs, (activate(gate, ACTIVATION) * up).to(Out.dtype.element_ty), mask=inside)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """As `activation.gated_activation`, rounded once."""
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], width)
    launch(
        _gated_kernel,
        (cdiv(width, _BLOCK), gate_up.shape[0]),
        gate_up,
        out,
        WIDTH=width,
        BLOCK=_BLOCK,
        ACTIVATION=activation,
    )
    return out
