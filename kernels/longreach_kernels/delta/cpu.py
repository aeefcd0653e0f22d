"""The rule and the convolution on a CPU: chunks of a sequence through the matrix library, in linear memory."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.delta.batch import StateBatch

CHUNK = 64


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
    """As `longreach_kernels.delta.gated_delta_rule`, in fp32, or in fp64 where v or the states are that."""
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    wide = torch.promote_types(torch.promote_types(v.dtype, states.dtype), torch.float32)
    decodes = batch.decodes
    if decodes:
        rows = slice(0, decodes)
        tensors = _by_head(q[rows, None], k[rows, None], v[rows, None], log_decay[rows, None], beta[rows, None], wide)
        new, last = _chunk(*_normalised(*tensors, scale, epsilon), gathered(states, batch.read[rows]).to(wide))
        out[rows] = new[:, :, 0].to(out.dtype)
        scatter(states, batch.write[rows], last)
    for start, end, read, write in batch.host_ranges[decodes:]:
        state = states[read].to(wide) if read >= 0 else states.new_zeros(states.shape[1:], dtype=wide)
        for first in range(start, end, CHUNK):
            rows = slice(first, min(first + CHUNK, end))
            tensors = _by_head(q[rows], k[rows], v[rows], log_decay[rows], beta[rows], wide)
            new, state = _chunk(*_normalised(*tensors, scale, epsilon), state)
            out[rows] = new.transpose(0, 1).to(out.dtype)
        if write >= 0:
            states[write] = state.to(states.dtype)
    return out


def _by_head(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens (..., C, H, D) as (..., Hv, C, D), and their numbers (..., C, Hv) as (..., Hv, C)."""
    group = v.shape[-2] // q.shape[-2]
    q, k, v = (x.transpose(-2, -3).to(dtype) for x in (q, k, v))
    q, k = (x.repeat_interleave(group, -3) for x in (q, k))
    return q, k, v, log_decay.mT.to(dtype), beta.mT.to(dtype)


def _normalised(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float, epsilon: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if epsilon is not None:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon) for x in (q, k))
    return q * scale, k, v, log_decay, beta


def _chunk(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (..., Hv, C, Dv) of a chunk and the state (..., Hv, Dk, Dv) after it.

    A token's change of the state is ``beta (v - S^T k)``, where S has the changes before it: a unit lower triangular
    system, whose right side has what the chunk's first state knows.
    """
    size = q.shape[-2]
    between = sums_between(log_decay)
    weights = torch.where(torch.ones(size, size, dtype=torch.bool, device=q.device).tril(), between.exp(), 0.0)
    from_start = log_decay.cumsum(-1).exp()[..., None]
    system = beta[..., None] * (k @ k.mT) * weights
    known = from_start * (k @ state)
    changes = torch.linalg.solve_triangular(system, beta[..., None] * (v - known), upper=False, unitriangular=True)
    out = from_start * (q @ state) + (q @ k.mT * weights) @ changes
    to_end = weights[..., -1, :, None]
    return out, from_start[..., -1:, :] * state + (to_end * k).mT @ changes


def sums_between(log_decay: Tensor) -> Tensor:
    """(..., C, C): sums over what comes after token j, up to token i. Each is summed by itself, for the difference of
    two sums from the start has lost its digits where a strong decay lies before both."""
    size = log_decay.shape[-1]
    after = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    return torch.where(after, log_decay[..., :, None], 0.0).cumsum(-2)


def gathered(states: Tensor, read: Tensor) -> Tensor:
    """The states of slots, or zeros where a slot is -1."""
    found = states[read.clamp(min=0)]
    return torch.where((read >= 0).view(-1, *[1] * (states.dim() - 1)), found, 0.0)


def scatter(states: Tensor, write: Tensor, values: Tensor) -> None:
    """Write states to slots, but for those of slot -1."""
    kept = write >= 0
    states[write[kept]] = values[kept].to(states.dtype)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: StateBatch, silu: bool
) -> Tensor:
    """As `longreach_kernels.delta.short_convolution`, in fp32, or in fp64 where x is that."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    taps, bias = weight.to(wide), None if bias is None else bias.to(wide)
    decodes = batch.decodes
    if decodes:
        inputs = torch.cat([gathered(states, batch.read[:decodes]), x[:decodes, :, None]], 2)  # (B, C, W)
        total = _summed([inputs[:, :, j].to(wide) for j in range(weight.shape[1])], taps)
        out[:decodes] = _finished(total, bias, silu).to(out.dtype)
        scatter(states, batch.write[:decodes], inputs[:, :, 1:])
    for start, end, read, write in batch.host_ranges[decodes:]:
        state = states[read] if read >= 0 else states.new_zeros(states.shape[1:])
        inputs = torch.cat([state.T, x[start:end]])  # (W - 1 + tokens, C)
        total = _summed([inputs[j : j + end - start].to(wide) for j in range(weight.shape[1])], taps)
        out[start:end] = _finished(total, bias, silu).to(out.dtype)
        if write >= 0:
            states[write] = inputs[end - start :].T
    return out


def _summed(inputs: list[Tensor], taps: Tensor) -> Tensor:
    """The sum over taps, in their order whatever the number of rows."""
    total = inputs[0] * taps[:, 0]
    for j in range(1, len(inputs)):
        total = total + inputs[j] * taps[:, j]
    return total


def _finished(total: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    total = total if bias is None else total + bias
    return torch.nn.functional.silu(total) if silu else total
