"""The rule and the convolution in fp64, token by token: the specification, and very slow."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.delta.batch import StateBatch


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    batch: StateBatch,
    scale: float,
    epsilon: float | None,
) -> Tensor:
    """As `longreach_kernels.delta.gated_delta_rule`; the state stays fp64 within a call."""
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    group = v.shape[1] // q.shape[1]
    before = [state_of(states, one.read) for one in batch.host_ranges]
    for (start, end, _, write), state in zip(batch.host_ranges, before, strict=True):
        for t in range(start, end):
            query, key = (_heads(x[t].double(), group, epsilon) for x in (q, k))
            state = state * log_decay[t].double().exp()[:, None, None]
            known = (state * key[:, :, None]).sum(1)
            change = (v[t].double() - known) * beta[t].double()[:, None]
            state = state + key[:, :, None] * change[:, None, :]
            out[t] = scale * (state * query[:, :, None]).sum(1)
        if write >= 0:
            states[write] = state.to(states.dtype)
    return out


def _heads(x: Tensor, group: int, epsilon: float | None) -> Tensor:
    """Keys or queries (Hk, Dk) of a token for each value head, (Hv, Dk)."""
    if epsilon is not None:
        x = x / (x.square().sum(-1, keepdim=True) + epsilon).sqrt()
    return x.repeat_interleave(group, 0)


def state_of(states: Tensor, slot: int) -> Tensor:
    """The state of a slot in fp64, or zeros where it is -1."""
    return states[slot].double() if slot >= 0 else states.new_zeros(states.shape[1:], dtype=torch.float64)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: StateBatch, silu: bool
) -> Tensor:
    """As `longreach_kernels.delta.short_convolution`."""
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    width, taps = weight.shape[1], weight.double()
    before = [state_of(states, one.read) for one in batch.host_ranges]
    for (start, end, _, write), state in zip(batch.host_ranges, before, strict=True):
        inputs = torch.cat([state, x[start:end].double().T], 1)  # (C, W - 1 + tokens)
        for t in range(end - start):
            total = (inputs[:, t : t + width] * taps).sum(1)
            total = total if bias is None else total + bias.double()
            out[start + t] = torch.nn.functional.silu(total) if silu else total
        if write >= 0:
            states[write] = inputs[:, inputs.shape[1] - (width - 1) :].to(states.dtype)
    return out
