"""The Triton form of `norm`."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import launch
from torch import Tensor


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


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As `norm.rms_norm`, rounded once."""
    rows, width = x.shape
    out = torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(width)
        warps = 8 if block >= 4096 else 4
        launch(_norm_kernel, (rows,), x, weight, out, epsilon, WIDTH=width, BLOCK=block, num_warps=warps)
    return out
