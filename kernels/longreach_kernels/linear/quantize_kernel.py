"""Activations in FP8, made by one kernel: the greatest value, the scale, and the cast.

What comes before may be part of it: a gated activation.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.linear.activation import Activation
from longreach_kernels.linear.activation_kernel import activate
from longreach_kernels.linear.formats import FP8

_GROUP = 128
_BLOCK = 2048


class Fp8Rows(NamedTuple):
    """Activations in FP8, and what they are multiplied by.

    Attributes:
        values: (T, K) float8_e4m3fn. T is rounded up to a multiple of 4, with zeros.
        scales: float32, (T, 1) by token, or (T, ceil(K / 128)) by token and 128 inputs, with neighbouring tokens.
    """

    values: Tensor
    scales: Tensor


@triton.jit
def _fp8_scale(greatest):
    """Of zeros it is 1."""
    return tl.where(greatest > 0.0, greatest / 448.0, 1.0)


@triton.jit
def _input(X, row, offs, inside, WIDTH: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr):
    """Some inputs of a row as fp32."""
    if GATED:
        gates = tl.load(X + row * 2 * WIDTH + offs, mask=inside, other=0.0).to(tl.float32)
        ups = tl.load(X + row * 2 * WIDTH + WIDTH + offs, mask=inside, other=0.0).to(tl.float32)
        # Rounded as a tensor between the two would be, so that fusing them changes nothing.
        x = (activate(gates, ACTIVATION) * ups).to(X.dtype.element_ty).to(tl.float32)
    else:
        x = tl.load(X + row * WIDTH + offs, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["num_rows", "bound"])
def _by_token_kernel(
    X,
    Static,
    Out,
    Scales,
    num_rows,
    bound,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Grid (rows,): a row in one piece. `Static` is a scale for all, or None; `bound` is on the greatest value."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < WIDTH
    x = _input(X, row, offs, inside & (row < num_rows), WIDTH, GATED, ACTIVATION)
    if Static is not None:
        scale = tl.load(Static)
    else:
        scale = _fp8_scale(tl.minimum(tl.max(tl.abs(x), 0), bound))
    values = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    tl.store(Out + row * WIDTH + offs, values.to(tl.float8e4nv), mask=inside)
    tl.store(Scales + row, scale)


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def _by_group_kernel(
    X,
    Out,
    Scales,
    num_rows,
    padded_rows,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Grid (rows, blocks of GROUPS groups of 128), rows first: the second dim ends at 65535. Scales lie by group."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offs = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = offs < WIDTH
    x = _input(X, row, offs, inside & (row < num_rows), WIDTH, GATED, ACTIVATION)
    scale = _fp8_scale(tl.max(tl.abs(x), 1))
    values = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0)
    tl.store(Out + row * WIDTH + offs, values.to(tl.float8e4nv), mask=inside)
    tl.store(Scales + group.to(tl.int64) * padded_rows + row, scale, mask=group * 128 < WIDTH)


def rows_by_token(
    x: Tensor,
    static: Tensor | None = None,
    bound: float | None = None,
    *,
    gated: bool = False,
    activation: Activation = "silu",
) -> Fp8Rows:
    """x (T, K), or activation(gates) * ups of x (T, 2 K) if `gated`, with a scale for each token.

    Args:
        static: (1,) or () float32, one scale for all tokens.
        bound: upper bound on the greatest value of which a scale is made.
    """
    rows, width = len(x), x.shape[1] // 2 if gated else x.shape[1]
    padded = cdiv(max(rows, 1), 4) * 4
    out = torch.empty(padded, width, dtype=FP8, device=x.device)
    scales = torch.empty(padded, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    launch(
        _by_token_kernel,
        (padded,),
        x,
        static,
        out,
        scales,
        rows,
        float("inf") if bound is None else float(bound),
        WIDTH=width,
        BLOCK=block,
        GATED=gated,
        ACTIVATION=activation,
        num_warps=4 if block <= 4096 else 8 if block <= 16384 else 16,
    )
    return Fp8Rows(out, scales)


def rows_by_group(x: Tensor, *, gated: bool = False, activation: Activation = "silu") -> Fp8Rows:
    """As `rows_by_token`, with a scale for each token and 128 inputs."""
    rows, width = len(x), x.shape[1] // 2 if gated else x.shape[1]
    padded = cdiv(max(rows, 1), 4) * 4
    groups = cdiv(width, _GROUP)
    out = torch.empty(padded, width, dtype=FP8, device=x.device)
    scales = torch.empty(groups, padded, dtype=torch.float32, device=x.device)
    block = min(_BLOCK // _GROUP, triton.next_power_of_2(groups))
    launch(
        _by_group_kernel,
        (padded, cdiv(groups, block)),
        x,
        out,
        scales,
        rows,
        padded,
        WIDTH=width,
        GROUPS=block,
        GATED=gated,
        ACTIVATION=activation,
        num_warps=4,
    )
    return Fp8Rows(out, scales.T)
