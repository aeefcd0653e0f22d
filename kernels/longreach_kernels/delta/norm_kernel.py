"""The gated norm in Triton: rows of heads, several to a program."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch

_BLOCK = 2048  # numbers of a program


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    X,
    Gate,
    Weight,
    Out,
    rows,
    stride_x,
    stride_xh,
    stride_g,
    stride_gh,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHT_BY_HEAD: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):
    """Grid (blocks of rows,): Out (T, H, D), dense; a row is a head of a token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_D)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    inside = (row < rows)[:, None] & (channels < DIM)[None, :]
    places = (token * stride_x + head * stride_xh)[:, None] + channels[None, :]
    x = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
    factor = tl.full(x.shape, 1.0, tl.float32)
    if Gate is not None:
        places = (token * stride_g + head * stride_gh)[:, None] + channels[None, :]
        gate = tl.load(Gate + places, mask=inside, other=0.0).to(tl.float32)
        factor = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= factor
    x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    if WEIGHT_BY_HEAD:
        x *= tl.load(Weight + head[:, None] * DIM + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        x *= tl.load(Weight + channels, mask=channels < DIM, other=0.0).to(tl.float32)[None, :]
    if not GATE_FIRST:
        x *= factor
    places = row.to(tl.int64)[:, None] * DIM + channels[None, :]
    tl.store(Out + places, x.to(Out.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    """As `longreach_kernels.delta.gated_norm`."""
    tokens, heads, dim = x.shape
    out = x.new_empty(x.shape)
    block = triton.next_power_of_2(dim)
    rows = max(1, _BLOCK // block)
    if out.numel():
        launch(
            _norm_kernel,
            (cdiv(tokens * heads, rows),),
            x,
            gate,
            weight,
            out,
            tokens * heads,
            *x.stride()[:2],
            *(x if gate is None else gate).stride()[:2],
            eps,
            HEADS=heads,
            DIM=dim,
            ROWS=rows,
            BLOCK_D=block,
            WEIGHT_BY_HEAD=weight.dim() == 2,
            GATE_FIRST=gate_first,
            num_warps=4 if block <= _BLOCK else 8,
        )
    return out
