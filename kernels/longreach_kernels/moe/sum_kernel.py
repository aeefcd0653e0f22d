"""The sum of a token's k results, in the order of its experts, and with the residual stream."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch

_BLOCK = 1024


@triton.jit
def _sum_kernel(
    Pairs,
    Chosen,
    Out,
    C: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Grid (T, blocks of channels): Out (T, C) of Pairs (T, k, C). Pairs whose expert is not here are not there."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < C
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        expert = tl.load(Chosen + token * TOP_K + rank) - FIRST
        here = (expert >= 0) & (expert < E)
        total += tl.load(Pairs + (token * TOP_K + rank) * C + channels, mask=inside & here, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        total *= SCALE
    if ADD:
        total += tl.load(Out + token * C + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + token * C + channels, total.to(Out.dtype.element_ty), mask=inside)


def sum_pairs(pairs: Tensor, chosen: Tensor, out: Tensor, experts: int, first: int, *, add: bool, scale: float) -> None:
    """out (T, C) = scale * the sum of pairs (T k, C) over k, or plus that if `add`; rounded once."""
    tokens, channels = out.shape
    block = min(_BLOCK, triton.next_power_of_2(channels))
    launch(
        _sum_kernel,
        (tokens, cdiv(channels, block)),
        pairs,
        chosen,
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
