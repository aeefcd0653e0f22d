"""An RMSNorm whose result is quantised at once, and a product that is added to the residual stream before it.

Apart, these are three kernels that each read and write all activations of a step.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.backends.triton.overlap import follow, let_follow, overlap_options
from longreach_kernels.linear.formats import FP8
from longreach_kernels.linear.quantize_kernel import Fp8Rows
from torch import Tensor

from longreach_patches.fused.norm import Norm

_GROUP = 128


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def _norm_rows_kernel(
    X,
    Product,
    Weight,
    Out,
    Scales,
    epsilon,
    num_rows,
    padded_rows,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GROUPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (padded rows,): X += SCALE * Product, if there is one; Out and Scales are X's norm in FP8."""
    let_follow(OVERLAP)
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < WIDTH
    there = inside & (row < num_rows)
    x = tl.load(X + row * WIDTH + offs, mask=there, other=0.0).to(tl.float32)
    # Sums and norms are rounded as tensors between the kernels would be, so that joining these changes nothing.
    if Product is not None:
        added = tl.load(Product + row * WIDTH + offs, mask=there, other=0.0).to(tl.float32)
        stream = (x + added * SCALE).to(X.dtype.element_ty)
        tl.store(X + row * WIDTH + offs, stream, mask=there)
        x = stream.to(tl.float32)
    weight = tl.load(Weight + offs, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    factor = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    x = (x * factor * weight).to(X.dtype.element_ty).to(tl.float32)
    if GROUPED:
        groups = tl.reshape(x, (BLOCK // 128, 128))
        greatest = tl.max(tl.abs(groups), 1)
        scale = tl.where(greatest > 0.0, greatest / 448.0, 1.0)
        group = tl.arange(0, BLOCK // 128)
        tl.store(Scales + group.to(tl.int64) * padded_rows + row, scale, mask=group * 128 < WIDTH)
        values = tl.reshape(groups / scale[:, None], (BLOCK,))
    else:
        greatest = tl.max(tl.abs(x), 0)
        scale = tl.where(greatest > 0.0, greatest / 448.0, 1.0)
        tl.store(Scales + row, scale)
        values = x / scale
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    tl.store(Out + row * WIDTH + offs, values.to(tl.float8e4nv), mask=inside)


def norm_rows(x: Tensor, norm: Norm, *, grouped: bool, add: Tensor | None = None, scale: float = 1.0) -> Fp8Rows:
    """The RMSNorm of each row of x (T, C), contiguous, in FP8: by token, or by token and 128 channels if `grouped`.

    With `add` (T, C), contiguous, that times `scale` is added to x first, in place.
    """
    rows, width = x.shape
    padded = cdiv(max(rows, 1), 4) * 4
    out = torch.empty(padded, width, dtype=FP8, device=x.device)
    scales = torch.empty(cdiv(width, _GROUP) if grouped else 1, padded, dtype=torch.float32, device=x.device)
    block = max(_GROUP, triton.next_power_of_2(width))
    launch(
        _norm_rows_kernel,
        (padded,),
        x,
        add,
        norm.weight,
        out,
        scales,
        norm.epsilon,
        rows,
        padded,
        SCALE=scale,
        WIDTH=width,
        BLOCK=block,
        PLUS_ONE=norm.kind == "rms_plus_one",
        GROUPED=grouped,
        **overlap_options(x.device),
        num_warps=8 if block >= 4096 else 4,
    )
    return Fp8Rows(out, scales.T if grouped else scales.view(padded, 1))
