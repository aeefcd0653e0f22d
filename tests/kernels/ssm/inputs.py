"""Random steps for Mamba-2's recurrence, the recurrence as a plain model computes it, and how far a result may be off.

How far: as in `tests.kernels.delta.inputs`. The oracle is the recurrence in fp64. `eager` is the plain chunked form,
with each operand of a product rounded to the inputs' dtype. A result may have twice its error, plus the rounding of the
result itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from longreach_kernels.delta import StateBatch
from longreach_kernels.ssm import cpu, ssd_scan
from longreach_kernels.ssm.scan import NO_LIMITS, ScanInputs
from torch import Tensor

from tests.kernels.accuracy import tolerance
from tests.kernels.delta.inputs import batch_of

STEPS = ("usual", "strong", "extreme", "none")
TENSORS = ("x", "b", "c", "dt", "a_log", "skip", "dt_bias", "states")
_ROWS = ("x", "b", "c", "dt")


@dataclass(frozen=True)
class Step:
    """Arguments of `ssd_scan`."""

    x: Tensor
    b: Tensor
    c: Tensor
    dt: Tensor
    a_log: Tensor
    skip: Tensor
    dt_bias: Tensor
    states: Tensor
    batch: StateBatch
    limits: tuple[float, float] = NO_LIMITS

    def run(self, backend: str) -> tuple[Tensor, Tensor]:
        """Outputs and the states afterwards; the step's own states stay."""
        states = self.states.clone()
        tensors = [getattr(self, name) for name in TENSORS[:-1]]
        return ssd_scan(*tensors, states, self.batch, dt_limits=self.limits, backend=backend), states

    def to(self, dtype: torch.dtype) -> Step:
        """The same with all numbers in another dtype."""
        return replace(self, **{name: getattr(self, name).to(dtype) for name in TENSORS})

    def oracle(self) -> tuple[Tensor, Tensor]:
        """The same in fp64: token by token on a CPU. On a GPU in the CPU's chunks, which are held to that."""
        wide = self.to(torch.float64)
        if self.x.is_cpu:
            return wide.run("reference")
        states = wide.states.clone()
        tensors = [getattr(wide, name) for name in TENSORS[:-1]]
        return cpu.ssd_scan(ScanInputs(*tensors, states, self.batch, self.limits)), states

    def alone(self, rows: slice, batch: StateBatch) -> Step:
        """Some rows of the step, in a batch of their own."""
        return replace(self, batch=batch, **{name: getattr(self, name)[rows] for name in _ROWS})


def step(
    lengths: list[int],
    *,
    groups: int = 1,
    heads: int = 2,
    state_size: int = 16,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    steps: str = "usual",
    read: list[int] | None = None,
    write: list[int] | None = None,
    limits: tuple[float, float] = NO_LIMITS,
    decodes: int | None = None,
) -> Step:
    """Random inputs; sequence b reads slot 2 b and writes slot 2 b + 1 unless told otherwise."""
    tokens, count = sum(lengths), len(lengths)
    # Decays to nearly nothing or to all but the last digits, steps of nearly nothing and of hundreds.
    rate, bias = {"usual": (0.0, -3.0), "strong": (2.0, 1.0), "extreme": (4.0, 0.0), "none": (-40.0, -6.0)}[steps]
    spread = 30.0 if steps == "extreme" else 1.0
    return Step(
        torch.randn(tokens, heads, dim).to(device, dtype),
        torch.randn(tokens, groups, state_size).to(device, dtype),
        torch.randn(tokens, groups, state_size).to(device, dtype),
        (spread * torch.randn(tokens, heads)).to(device, dtype),
        (rate + torch.rand(heads)).to(device),
        torch.randn(heads).to(device),
        (bias + torch.rand(heads)).to(device),
        (0.3 * torch.randn(2 * count + 1, heads, state_size, dim)).to(device),
        batch_of(
            lengths,
            [2 * b for b in range(count)] if read is None else read,
            [2 * b + 1 for b in range(count)] if write is None else write,
            device,
            decodes,
        ),
        limits,
    )


def eager(given: Step, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """The plain chunked form: operands of products in the inputs' dtype, sums and the state in fp32."""
    dtype = given.x.dtype

    def rounded(one: Tensor) -> Tensor:
        return one.to(dtype).float()

    group = given.x.shape[1] // given.b.shape[1]
    sizes = torch.nn.functional.softplus(given.dt.float() + given.dt_bias).clamp(*given.limits)
    decay, sizes = (-given.a_log.exp() * sizes).T, sizes.T
    b, c = (one.float().repeat_interleave(group, 1).transpose(0, 1) for one in (given.b, given.c))
    x = given.x.float().transpose(0, 1)
    out, after = torch.zeros_like(x), given.states.clone()
    for start, end, read, write in given.batch.host_ranges:
        state = given.states[read] if read >= 0 else torch.zeros_like(given.states[0])
        for first in range(start, end, chunk):
            t = slice(first, min(first + chunk, end))
            sums = decay[:, t].double().cumsum(1)  # differences of fp32's sums would excuse too much
            between = (sums[:, :, None] - sums[:, None, :]).tril().exp().tril().float()
            to_end = (sums[:, -1:] - sums).exp().float() * sizes[:, t]
            sums = sums.float()
            scores = rounded(c[:, t] @ b[:, t].mT * between * sizes[:, None, t])
            out[:, t] = (c[:, t] @ rounded(state)) * sums.exp()[..., None] + scores @ x[:, t]
            state = state * sums[:, -1, None, None].exp() + b[:, t].mT @ rounded(x[:, t] * to_end[..., None])
        if write >= 0:
            after[write] = state
    out += given.skip[:, None, None] * x
    return out.transpose(0, 1).to(dtype), after


def check(given: Step, backend: str) -> tuple[Tensor, Tensor]:
    """Hold outputs and states to the oracle, and what is written nowhere to what it was."""
    out, states = given.run(backend)
    exact, exact_states = given.oracle()
    low, low_states = eager(given)
    # A GPU multiplies numbers of fp32 as two of 11 bits each, two bits less than fp32 has.
    factor = 8.0 if out.is_cuda and out.dtype == torch.float32 else 2.0
    assert out.dtype == given.x.dtype
    assert out.shape == given.x.shape
    for name, got, expected, plain, dtype in (
        ("out", out, exact, low, out.dtype),
        ("states", states, exact_states, low_states, torch.float32),
    ):
        allowed = tolerance(expected, plain, dtype, factor) + 2e-6 * max(1.0, float(expected.abs().max()))
        error = float((got.double() - expected).abs().max())
        assert error <= allowed, f"{name}: off by {error:.3g}, {allowed:.3g} allowed"
    written = [slot for slot in given.batch.write.tolist() if slot >= 0]
    others = [slot for slot in range(len(states)) if slot not in written]
    assert torch.equal(states[others], given.states[others]), "a slot that nobody writes has changed"
    return out, states
