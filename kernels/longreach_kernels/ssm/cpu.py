"""The recurrence on a CPU: chunks of a sequence through the matrix library, in linear memory."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.delta.cpu import CHUNK, gathered, scatter, sums_between
from longreach_kernels.ssm.scan import ScanInputs


def ssd_scan(given: ScanInputs) -> Tensor:
    """As `longreach_kernels.ssm.ssd_scan`, in fp32, or in fp64 where x or the states are that."""
    x, states, batch = given.x, given.states, given.batch
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    wide = torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)
    steps = given.steps(wide).to(wide)
    log_decay = -given.a_log.to(wide).exp() * steps
    skip = 0.0 if given.skip is None else given.skip.to(wide)[:, None]
    decodes = batch.decodes
    if decodes:
        rows = slice(0, decodes)
        c, b, added, decay = (tensor.unsqueeze(-2) for tensor in _by_head(given, rows, steps, log_decay, wide))
        new, last = _chunk(c, b, added, decay, gathered(states, batch.read[rows]).to(wide))
        out[rows] = (new.squeeze(-2) + skip * x[rows].to(wide)).to(out.dtype)
        scatter(states, batch.write[rows], last)
    for start, end, read, write in batch.host_ranges[decodes:]:
        state = states[read].to(wide) if read >= 0 else states.new_zeros(states.shape[1:], dtype=wide)
        for first in range(start, end, CHUNK):
            rows = slice(first, min(first + CHUNK, end))
            c, b, added, decay = (tensor.transpose(0, 1) for tensor in _by_head(given, rows, steps, log_decay, wide))
            new, state = _chunk(c, b, added, decay, state)
            out[rows] = (new.transpose(0, 1) + skip * x[rows].to(wide)).to(out.dtype)
        if write >= 0:
            states[write] = state.to(states.dtype)
    return out


def _by_head(
    given: ScanInputs, rows: slice, steps: Tensor, log_decay: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of C and of B for each head (C, H, N), what they add (C, H, P), and logarithms of decays (C, H, 1)."""
    group = given.x.shape[1] // given.b.shape[1]
    c, b = (tensor[rows].to(dtype).repeat_interleave(group, 1) for tensor in (given.c, given.b))
    return c, b, given.x[rows].to(dtype) * steps[rows, :, None], log_decay[rows, :, None]


def _chunk(c: Tensor, b: Tensor, added: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (..., H, C, P) of a chunk without the skip, and the state (..., H, N, P) after it, from C and B
    (..., H, C, N), what is added (..., H, C, P) and logarithms of decays (..., H, C, 1)."""
    size = c.shape[-2]
    log_decay = log_decay.squeeze(-1)
    seen = torch.ones(size, size, dtype=torch.bool, device=c.device).tril()
    weights = torch.where(seen, sums_between(log_decay).exp(), 0.0)
    from_start = log_decay.cumsum(-1).exp()[..., None]
    out = from_start * (c @ state) + (c @ b.mT * weights) @ added
    return out, from_start[..., -1:, :] * state + (weights[..., -1, :, None] * b).mT @ added
