"""What follows a product, in Triton: the bias, the gated activation, and the sum with a residual stream."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.linear.activation import After

_BLOCK = 2048


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """x * sigmoid(x), or GELU with a hyperbolic tangent, fp32: 1 + tanh(y) is 2 sigmoid(2 y)."""
    at = x
    if ACTIVATION == "gelu_tanh":
        at = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    return x / (1.0 + tl.exp(-at))


@triton.jit
def _finish_kernel(
    Product,
    Bias,
    Out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Grid (blocks of a row, T). Out has WIDTH columns, Product twice as many if GATED."""
    row = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < WIDTH
    PARTS: tl.constexpr = 2 if GATED else 1
    x = tl.load(Product + row * PARTS * WIDTH + offs, mask=inside).to(tl.float32)
    if Bias is not None:
        x += tl.load(Bias + offs, mask=inside).to(tl.float32)
    if GATED:
        up = tl.load(Product + row * 2 * WIDTH + WIDTH + offs, mask=inside).to(tl.float32)
        if Bias is not None:
            up += tl.load(Bias + WIDTH + offs, mask=inside).to(tl.float32)
        x = activate(x, ACTIVATION) * up
    x *= SCALE
    if ADD:
        x += tl.load(Out + row * WIDTH + offs, mask=inside).to(tl.float32)
    tl.store(Out + row * WIDTH + offs, x.to(Out.dtype.element_ty), mask=inside)


def finish(product: Tensor, after: After) -> Tensor:
    """What follows a product (T, N), contiguous, rounded once. The product may be overwritten."""
    bias, gated, activation, add_to, scale = after
    if not (gated or bias is not None or add_to is not None or scale != 1.0):
        return product
    rows, outputs = product.shape
    width = outputs // 2 if gated else outputs
    out = add_to if add_to is not None else product.new_empty(rows, width) if gated else product
    if rows:
        launch(
            _finish_kernel,
            (cdiv(width, _BLOCK), rows),
            product,
            bias,
            out,
            WIDTH=width,
            BLOCK=_BLOCK,
            GATED=gated,
            ACTIVATION=activation,
            ADD=add_to is not None,
            SCALE=scale,
            num_warps=4,
        )
    return out
