"""Products of few rows with a weight matrix, for steps in which every sequence computes one token.

Such a product reads each weight once and computes next to nothing, so what counts is that memory is never idle: the
activation behind it and the sum with the residual stream are part of the same kernel, and sums are not split.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import capability, cdiv, launch
from torch import Tensor

from longreach_patches.fused.activation import Activation
from longreach_patches.fused.activation_kernel import activate
from longreach_patches.fused.dispatch import MAX_ROWS

_LEAST_ROWS = 16  # a second size, so that few forms are compiled
# Programs of wide tiles that keep the multiprocessors busy; below, tiles are narrow and there are more of them.
_WIDE_PROGRAMS = 90


class ProductConfig(NamedTuple):
    """Tile of the weights (outputs, inputs), warps, and loads in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    X,
    W,
    Bias,
    Out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of outputs,): Out (rows, N) of X (rows, K) and W (N, K), or W (2 N, K), gates first, if GATED.
    W's rows are STRIDE apart."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, ROWS)
    has_row = rows < num_rows
    inside = offs_n < N
    w_ptrs = W + offs_n.to(tl.int64)[:, None] * STRIDE + offs_k[None, :]
    x_ptrs = X + rows[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    acc_up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, K, BLOCK_K):
        known = start + offs_k < K
        w = tl.load(w_ptrs + start, mask=inside[:, None] & known[None, :], other=0.0)
        x = tl.load(x_ptrs + start, mask=known[:, None] & has_row[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(w_ptrs + N * STRIDE + start, mask=inside[:, None] & known[None, :], other=0.0)
            acc_up = tl.dot(up, x, acc_up, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(Bias + offs_n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(Bias + N + offs_n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activate(acc, ACTIVATION) * acc_up
    places = Out + rows[None, :] * N + offs_n[:, None]
    valid = inside[:, None] & has_row[None, :]
    if SCALE != 1.0:
        acc *= SCALE
    if ADD:
        acc += tl.load(places, mask=valid, other=0.0).to(tl.float32)
    tl.store(places, acc.to(Out.dtype.element_ty), mask=valid)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: Activation = "silu",
    add_to: Tensor | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T for x (T, K), T at most MAX_ROWS, and W (N, K), accumulated in fp32: (T, N). All are contiguous, but W may
    be some columns of a wider one.

    Args:
        bias: (N,), added to the product.
        gated: the first half of the outputs are gates: activation(gate) * up of them, (T, N / 2).
        activation: that of gates.
        scale: what the product, with its bias, is multiplied by.
        add_to: (T, N), to which the product is added in place and which is returned.
        out_dtype: of what is returned, if nothing is added to; by default that of x.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(rows, outputs, dtype=out_dtype or x.dtype) if add_to is None else add_to
    config = configure(outputs, x.dtype, capability(x.device))
    launch(
        _product_kernel,
        (cdiv(outputs, config.block_n),),
        x,
        weight,
        bias,
        out,
        rows,
        N=outputs,
        K=inputs,
        STRIDE=weight.stride(0),
        ROWS=_LEAST_ROWS if rows <= _LEAST_ROWS else MAX_ROWS,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GATED=gated,
        ACTIVATION=activation,
        BIAS=bias is not None,
        ADD=add_to is not None,
        SCALE=scale,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def configure(outputs: int, dtype: torch.dtype, arch: int) -> ProductConfig:
    """The tile, as measured on an H200 with the weights of an 8B model; fewer loads in flight where there is less
    shared memory (99 KB a block on sm_86, sm_89 and sm_120)."""
    if dtype == torch.float32:  # exact products run on the ordinary units, whose operands sit in registers
        return ProductConfig(16, 64, 4, 2)
    stages = 5 if 90 <= arch < 120 else 3
    wide = ProductConfig(64, 128, 4, stages)
    return wide if cdiv(outputs, wide.block_n) >= _WIDE_PROGRAMS else ProductConfig(16, 256, 2, stages)
