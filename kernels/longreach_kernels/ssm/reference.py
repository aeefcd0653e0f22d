"""The recurrence in fp64, token by token: the specification, and very slow."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.delta.reference import state_of
from longreach_kernels.ssm.scan import ScanInputs


def ssd_scan(given: ScanInputs) -> Tensor:
    """As `longreach_kernels.ssm.ssd_scan`; the state stays fp64 within a call."""
    x, states = given.x, given.states
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    group = x.shape[1] // given.b.shape[1]
    steps, rate = given.steps(torch.float64), given.a_log.double().exp()
    skip = torch.zeros_like(rate) if given.skip is None else given.skip.double()
    before = [state_of(states, one.read) for one in given.batch.host_ranges]
    for (start, end, _, write), state in zip(given.batch.host_ranges, before, strict=True):
        for t in range(start, end):
            b, c = (rows[t].double().repeat_interleave(group, 0) for rows in (given.b, given.c))
            added = steps[t, :, None] * x[t].double()
            state = state * (-rate * steps[t]).exp()[:, None, None] + b[:, :, None] * added[:, None, :]
            out[t] = (state * c[:, :, None]).sum(1) + skip[:, None] * x[t].double()
        if write >= 0:
            states[write] = state.to(states.dtype)
    return out
