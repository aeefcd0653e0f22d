"""The gated activation of an MLP (SwiGLU, Shazeer 2020), in one kernel over the joined gate and up projections."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_patches.fused.dispatch import uses_triton


def silu_mul(gate_up: Tensor, backend: str = "auto") -> Tensor:
    """silu(gate) * up of `gate_up` (T, 2 I), gates first, contiguous: (T, I). The kernels round once."""
    if uses_triton(gate_up, backend):
        from longreach_patches.fused import activation_kernel

        return activation_kernel.silu_mul(gate_up)
    width = gate_up.shape[1] // 2
    return torch.nn.functional.silu(gate_up[:, :width]).mul_(gate_up[:, width:])
