"""RMSNorm (Zhang and Sennrich 2019) for steps that need no gradient: for few rows a third of the time of torch's."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from longreach_kernels.portable.config import launch
from torch import Tensor

from .dispatch import uses_triton


@triton.jit
def _norm_kernel(X, Weight, Out, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < WIDTH
    x = tl.load(X + row * WIDTH + offs, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(Weight + offs, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    tl.store(Out + row * WIDTH + offs, (x * factor * weight).to(Out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, backend: str = "auto") -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight of each row of x (T, C), contiguous. The kernel rounds once."""
    rows, width = x.shape
    if not uses_triton(x, backend):
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)
    out = torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(width)
        warps = 8 if block >= 4096 else 4
        launch(_norm_kernel, (rows,), x, weight, out, epsilon, WIDTH=width, BLOCK=block, num_warps=warps)
    return out
