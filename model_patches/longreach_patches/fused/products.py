"""Products of few rows with a weight matrix, for steps in which every sequence computes one token.

Such a product reads each weight once and computes next to nothing, so what counts is that memory is never idle: the
norm before it, the activation behind it and the sum with the residual stream are part of the same kernel.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from longreach_kernels.portable.config import cdiv, launch
from torch import Tensor

from .activation import silu

MAX_ROWS = 64


class Config(NamedTuple):
    """Tile of the weights (outputs, inputs), warps, and loads in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
def _product_kernel(
    X,
    W,
    NormWeight,
    Bias,
    Out,
    num_rows,
    epsilon,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of outputs,): Out (rows, N) of X (rows, K) and W (N, K), or W (2 N, K), gates first, if GATED."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, ROWS)
    has_row = rows < num_rows
    inside = offs_n < N
    w_ptrs = W + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    x_ptrs = X + rows[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    acc_up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    squares = tl.zeros((BLOCK_K, ROWS), tl.float32)
    for start in range(0, K, BLOCK_K):
        known = start + offs_k < K
        w = tl.load(w_ptrs + start, mask=inside[:, None] & known[None, :], other=0.0)
        x = tl.load(x_ptrs + start, mask=known[:, None] & has_row[None, :], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            weight = tl.load(NormWeight + start + offs_k, mask=known, other=0.0).to(tl.float32)
            x = (wide * weight[:, None]).to(x.dtype)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(w_ptrs + N * K + start, mask=inside[:, None] & known[None, :], other=0.0)
            acc_up = tl.dot(up, x, acc_up, input_precision=PRECISION)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
        acc *= factor[None, :]
        acc_up *= factor[None, :]
    if BIAS:
        acc += tl.load(Bias + offs_n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(Bias + N + offs_n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = silu(acc) * acc_up
    places = Out + rows[None, :] * N + offs_n[:, None]
    valid = inside[:, None] & has_row[None, :]
    if ADD:
        acc += tl.load(places, mask=valid, other=0.0).to(tl.float32)
    tl.store(places, acc.to(Out.dtype.element_ty), mask=valid)


def product(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """x W^T for x (T, K), T at most MAX_ROWS, and W (N, K), all contiguous, accumulated in fp32: (T, N).

    Args:
        bias: (N,), added to the product.
        norm: weight (K,) and epsilon of an RMSNorm that x passes first.
        gated: the first half of the outputs are gates: silu(gate) * up of them, (T, N / 2).
        add_to: (T, N), to which the product is added in place and which is returned.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(rows, outputs) if add_to is None else add_to
    config = config or configure(outputs, inputs)
    launch(
        _product_kernel,
        (cdiv(outputs, config.block_n),),
        x,
        weight,
        norm[0] if norm else None,
        bias,
        out,
        rows,
        norm[1] if norm else 0.0,
        N=outputs,
        K=inputs,
        ROWS=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        ADD=add_to is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def configure(outputs: int, inputs: int) -> Config:
    """The tile for a shape of weights: programs for every multiprocessor, and enough bytes in flight in each."""
    return Config(32, 128, 4, 4)
