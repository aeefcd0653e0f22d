"""Decays and betas of tokens in Triton."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch

_BLOCK = 512


@triton.jit
def softplus(a):
    """``log(1 + exp(a))`` in fp32, to the last digits also where it is nearly 0."""
    # The sum of 1 and a small power has lost the power's digits: its logarithm is the start of its series.
    power = tl.exp(-tl.abs(a))
    series = power * (1.0 - power * (1.0 / 2 - power * (1.0 / 3 - power * (1.0 / 4 - power * (1.0 / 5)))))
    return tl.maximum(a, 0.0) + tl.where(power < 0.0625, series, tl.log(1.0 + power))


@triton.jit(do_not_specialize=["count"])
def _gates_kernel(
    A,
    B,
    DecayLog,
    Bias,
    LogDecay,
    Beta,
    count,
    strides_a,
    strides_b,
    HEADS: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of numbers,): LogDecay and Beta (T, Hv), dense, of `count` numbers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    token, head = place // HEADS, place % HEADS
    a = tl.load(A + token * strides_a[0] + head * strides_a[1], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + token * strides_b[0] + head * strides_b[1], mask=inside, other=0.0).to(tl.float32)
    a += tl.load(Bias + head, mask=inside, other=0.0).to(tl.float32)
    steps = softplus(a)
    rate = tl.exp(tl.load(DecayLog + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(LogDecay + place, -rate * steps, mask=inside)
    tl.store(Beta + place, BETA_SCALE / (1.0 + tl.exp(-b)), mask=inside)


def decay_and_beta(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, beta_scale: float) -> tuple[Tensor, Tensor]:
    """As `longreach_kernels.delta.decay_and_beta`."""
    log_decay, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if a.numel():
        launch(
            _gates_kernel,
            (cdiv(a.numel(), _BLOCK),),
            a,
            b,
            a_log,
            dt_bias,
            log_decay,
            beta,
            a.numel(),
            a.stride(),
            b.stride(),
            HEADS=a.shape[1],
            BETA_SCALE=beta_scale,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return log_decay, beta
