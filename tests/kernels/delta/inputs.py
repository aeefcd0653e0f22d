"""Random steps for the gated delta rule, the rule as a plain model computes it, and how far a result may be off.

How far: the oracle is the recurrence in fp64. A chunked form multiplies numbers of the inputs' dtype and sums in fp32.
So its error is what rounding the operands of its products does. `eager` is the plain chunked form, with each operand
rounded. A result may have twice its error, plus the rounding of the result itself (`tests.kernels.accuracy.tolerance`).
A GPU multiplies numbers of fp32 as two of 11 bits each, two bits less than fp32 has: four times that is excused there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from longreach_kernels.delta import StateBatch, cpu, gated_delta_rule
from torch import Tensor

from tests.kernels.accuracy import tolerance

DECAYS = ("weak", "strong", "extreme", "none")


@dataclass(frozen=True)
class Step:
    """Arguments of `gated_delta_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    states: Tensor
    batch: StateBatch
    normalise_qk: float | None = 1e-6

    def run(self, backend: str) -> tuple[Tensor, Tensor]:
        """Outputs and the states afterwards; the step's own states stay."""
        states = self.states.clone()
        out = gated_delta_rule(
            *(self.q, self.k, self.v, self.log_decay, self.beta, states, self.batch),
            normalise_qk=self.normalise_qk,
            backend=backend,
        )
        return out, states

    def oracle(self) -> tuple[Tensor, Tensor]:
        """The same in fp64: token by token on a CPU. On a GPU in the CPU's chunks, which are held to that."""
        wide = {name: getattr(self, name).double() for name in ("q", "k", "v", "log_decay", "beta", "states")}
        if self.q.is_cpu:
            return replace(self, **wide).run("reference")
        tensors = (wide[name] for name in ("q", "k", "v", "log_decay", "beta"))
        out = cpu.gated_delta_rule(*tensors, wide["states"], self.batch, self.q.shape[2] ** -0.5, self.normalise_qk)
        return out, wide["states"]


def moved(batch: StateBatch, device: Any) -> StateBatch:
    """The same batch on another device."""
    tensors = (x.to(device) for x in (batch.cu_seqlens_q, batch.read, batch.write))
    return StateBatch(*tensors, batch.max_seqlen_q, batch.num_decodes)


def batch_of(
    lengths: list[int], read: list[int], write: list[int], device: Any = "cpu", decodes: int | None = None
) -> StateBatch:
    """Sequences of these lengths; leading ones of one row are decodes."""
    if decodes is None:
        decodes = next((i for i, length in enumerate(lengths) if length != 1), len(lengths))
    return StateBatch(
        torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        torch.tensor(read, device=device),
        torch.tensor(write, device=device),
        max(1, *lengths),
        decodes,
    )


def step(
    lengths: list[int],
    *,
    key_heads: int = 1,
    heads: int = 2,
    key_dim: int = 16,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    decay: str = "weak",
    read: list[int] | None = None,
    write: list[int] | None = None,
    normalise: bool = True,
    decodes: int | None = None,
) -> Step:
    """Random inputs; sequence b reads slot 2 b and writes slot 2 b + 1 unless told otherwise."""
    tokens, count = sum(lengths), len(lengths)
    q, k = (torch.randn(tokens, key_heads, key_dim) for _ in range(2))
    if not normalise:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    log_decay = {
        "weak": -torch.rand(tokens, heads) * 0.1,
        "strong": -torch.rand(tokens, heads) * 20,
        "extreme": -torch.tensor([0.0, 1e-3, 100.0, 1e4])[torch.randint(4, (tokens, heads))],
        "none": torch.zeros(tokens, heads),
    }[decay]
    return Step(
        q.to(device, dtype),
        k.to(device, dtype),
        torch.randn(tokens, heads, dim).to(device, dtype),
        log_decay.to(device),
        (2 * torch.rand(tokens, heads)).to(device, dtype),
        (0.3 * torch.randn(2 * count + 1, heads, key_dim, dim)).to(device),
        batch_of(
            lengths,
            [2 * b for b in range(count)] if read is None else read,
            [2 * b + 1 for b in range(count)] if write is None else write,
            device,
            decodes,
        ),
        1e-6 if normalise else None,
    )


def eager(given: Step, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """The plain chunked form: operands of products in the inputs' dtype, sums and the state in fp32."""
    dtype = given.v.dtype

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    group = given.v.shape[1] // given.k.shape[1]
    q, k, v, decay, beta, before = (
        x.float() for x in (given.q, given.k, given.v, given.log_decay, given.beta, given.states)
    )
    if given.normalise_qk is not None:
        q, k = (rounded(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + given.normalise_qk)) for x in (q, k))
    q, k = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (q, k))
    v, decay, beta = v.transpose(0, 1), decay.T, beta.T
    out, after = torch.zeros_like(v), before.clone()
    for start, end, read, write in given.batch.host_ranges:
        state = before[read] if read >= 0 else torch.zeros_like(before[0])
        for first in range(start, end, chunk):
            t = slice(first, min(first + chunk, end))
            sums = decay[:, t].double().cumsum(1)  # differences of fp32's sums would excuse too much
            between = (sums[:, :, None] - sums[:, None, :]).tril().exp().tril().float()
            to_end = (sums[:, -1:] - sums).exp().float()[..., None]
            sums = sums.float()
            system = torch.eye(t.stop - first, device=k.device) + (
                beta[:, t, None] * (k[:, t] @ k[:, t].mT) * between
            ).tril(-1)
            inverse = rounded(torch.linalg.inv(system))
            u = rounded(inverse @ rounded(v[:, t] * beta[:, t, None]))
            w = rounded(inverse @ rounded(k[:, t] * (beta[:, t] * sums.exp())[..., None]))
            changes = u - w @ rounded(state)
            scores = rounded(q[:, t] @ k[:, t].mT * between)
            out[:, t] = q.shape[-1] ** -0.5 * (
                (q[:, t] @ rounded(state)) * sums.exp()[..., None] + scores @ rounded(changes)
            )
            state = state * sums[:, -1, None, None].exp() + k[:, t].mT @ rounded(changes * to_end)
        if write >= 0:
            after[write] = state
    return out.transpose(0, 1).to(dtype), after


def check(given: Step, backend: str) -> tuple[Tensor, Tensor]:
    """Hold outputs and states to the oracle, and what is written nowhere to what it was."""
    out, states = given.run(backend)
    exact, exact_states = given.oracle()
    low, low_states = eager(given)
    factor = 8.0 if out.is_cuda and out.dtype == torch.float32 else 2.0
    assert out.dtype == given.v.dtype
    assert out.shape == given.v.shape
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
