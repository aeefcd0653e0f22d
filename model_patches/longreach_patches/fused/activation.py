"""The gated activation of an MLP (SwiGLU, GEGLU; Shazeer 2020), in one kernel over joined gate and up projections."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from longreach_patches.fused.dispatch import uses_triton

# GELU (Hendrycks and Gimpel 2016) is that with a hyperbolic tangent.
Activation = Literal["silu", "gelu_tanh"]
# What transformers' modules of these are called; torch's own SiLU stands where transformers has none.
BY_MODULE: dict[str, Activation] = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}


def gated_activation(gate_up: Tensor, activation: Activation = "silu", backend: str = "auto") -> Tensor:
    """activation(gate) * up of `gate_up` (T, 2 I), gates first, contiguous: (T, I). The kernels round once."""
    if uses_triton(gate_up, backend):
        from longreach_patches.fused import activation_kernel

        return activation_kernel.gated_activation(gate_up, activation)
    gate, up = gate_up.chunk(2, 1)
    if activation == "silu":
        return torch.nn.functional.silu(gate).mul_(up)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)
