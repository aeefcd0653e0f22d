"""Rows of tokens brought into the order of experts, and the weighted sum of a token's k results on the way back."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.linear.formats import FP8
from longreach_kernels.moe.packed_many_kernel import STEP
from longreach_kernels.moe.sort_kernel import SortedPairs

_BLOCK = 1024
_GATHERED = 8  # rows of a program


@triton.jit
def _sum_kernel(
    Rows,
    Places,
    Chosen,
    Weights,
    Out,
    C: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Grid (T, blocks of channels): Out (T, C) of Rows (P, C). Rows of experts that are not here are not there."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < C
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        expert = tl.load(Chosen + pair).to(tl.int32) - FIRST
        here = (expert >= 0) & (expert < E)
        weight = tl.load(Weights + pair).to(tl.float32)
        row = pair
        if Places is not None:
            row = tl.load(Places + pair, mask=here, other=0).to(tl.int64)
        result = tl.load(Rows + row * C + channels, mask=inside & here, other=0.0).to(tl.float32)
        total += result * weight
    if SCALE != 1.0:
        total *= SCALE
    if ADD:
        total += tl.load(Out + token * C + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + token * C + channels, total.to(Out.dtype.element_ty), mask=inside)


def sum_rows(
    rows: Tensor,
    order: SortedPairs | None,
    chosen: Tensor,
    weights: Tensor,
    out: Tensor,
    experts: int,
    first: int,
    *,
    add: bool,
    scale: float,
) -> None:
    """out (T, C) = scale * the sum of weights (T, k) times rows (P, C) over k, or plus that if `add`; rounded once.
    Without an order, rows are pairs. Pairs whose expert is not among `experts` from `first` on count nothing."""
    tokens, channels = out.shape
    block = min(_BLOCK, triton.next_power_of_2(channels))
    launch(
        _sum_kernel,
        (tokens, cdiv(channels, block)),
        rows,
        None if order is None else order.places,
        chosen,
        weights,
        out,
        C=channels,
        TOP_K=chosen.shape[1],
        E=experts,
        FIRST=first,
        BLOCK=block,
        ADD=add,
        SCALE=scale,
        num_warps=4,
    )


@triton.jit
def _gather_kernel(
    X,
    Order,
    NumTiles,
    Out,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of rows, blocks of channels): Out (P, WIDTH) of X (T, C), by row; of rows without an Order. With
    a STEP in the order of planes of so many inputs, and with zeros behind the channels."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_row = rows < tl.load(NumTiles + 1)
    tokens = rows.to(tl.int64)
    if Order is not None:
        tokens = tl.load(Order + rows, mask=has_row, other=0).to(tl.int64) // TOP_K
    x = tl.load(X + tokens[:, None] * C + channels[None, :], mask=has_row[:, None] & (channels < C)[None, :], other=0)
    if STEP > 0:
        planes = tl.permute(tl.reshape(x, (ROWS, BLOCK // STEP, STEP // 8, 8)), (0, 1, 3, 2))
        x = tl.reshape(planes, (ROWS, BLOCK))
    out = Out + rows.to(tl.int64)[:, None] * WIDTH + channels[None, :]
    tl.store(out, x, mask=has_row[:, None] & (channels < WIDTH)[None, :])


def gather_rows(x: Tensor, order: SortedPairs, top_k: int) -> Tensor:
    """Rows (P, C) of tokens x (T, C), sorted by expert."""
    pairs, channels = order.order.numel(), x.shape[1]
    out = x.new_empty(pairs, channels)
    if x.dtype == FP8 and channels % 4 == 0:  # as words, four at a time
        _gather(x.view(torch.int32), order, top_k, out.view(torch.int32))
    else:
        _gather(x, order, top_k, out)
    return out


def gather_planes(x: Tensor, order: SortedPairs, top_k: int | None) -> Tensor:
    """Rows (P, C) of tokens x (T, C), sorted by expert, or of such rows x (P, C) if `top_k` is None, as
    `packed_many_kernel` takes them: in the order of planes, with zeros up to a whole number of steps."""
    out = x.new_empty(order.order.numel(), cdiv(x.shape[1], STEP) * STEP)
    _gather(x, order, top_k, out, planes=True)
    return out


def _gather(x: Tensor, order: SortedPairs, top_k: int | None, out: Tensor, *, planes: bool = False) -> None:
    pairs, width = out.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    launch(
        _gather_kernel,
        (cdiv(pairs, _GATHERED), cdiv(width, block)),
        x,
        None if top_k is None else order.order,
        order.num_tiles,
        out,
        C=x.shape[1],
        WIDTH=width,
        TOP_K=top_k or 1,
        STEP=STEP if planes else 0,
        ROWS=_GATHERED,
        BLOCK=block,
        num_warps=4,
    )
