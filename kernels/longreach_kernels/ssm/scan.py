"""The recurrence of Mamba-2: checked arguments, and the form that computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.delta.batch import StateBatch
from longreach_kernels.delta.rule import check_states

MAX_STATE_SIZE = 256
NO_LIMITS = (0.0, float("inf"))


@dataclass(frozen=True)
class ScanInputs:
    """What the forms compute with: the arguments of `ssd_scan`, checked."""

    x: Tensor
    b: Tensor
    c: Tensor
    dt: Tensor
    a_log: Tensor
    skip: Tensor | None
    dt_bias: Tensor
    states: Tensor
    batch: StateBatch
    limits: tuple[float, float]

    def steps(self, dtype: torch.dtype) -> Tensor:
        """Sizes of steps (T, H) in `dtype`, or in fp64 where dt is that."""
        wide = torch.promote_types(self.dt.dtype, dtype)
        sizes = torch.nn.functional.softplus(self.dt.to(wide) + self.dt_bias.to(wide))
        return sizes.clamp(*self.limits)


def ssd_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    skip: Tensor | None,
    dt_bias: Tensor,
    states: Tensor,
    batch: StateBatch,
    *,
    dt_limits: tuple[float, float] = NO_LIMITS,
    backend: str = "auto",
) -> Tensor:
    """Each sequence's outputs, from its state in a slot; its last state goes to a slot.

    For one head and the tokens of a sequence, one after another, with a state S (N, P)::

        step = clamp(softplus(dt + dt_bias), *dt_limits)
        S = exp(-exp(a_log) * step) * S + b (step * x)^T
        out = S^T c + skip * x

    Heads share the B and C of a group in runs of H / G. Prompts are computed in chunks, counted from a sequence's first
    token of the step. A sequence's bits do not depend on the other sequences of a step, but they do on where a prompt
    is cut into steps. On a GPU nothing waits for the host.

    Args:
        x: (T, H, P), any strides, but channels are neighbours.
        b, c: (T, G, N) of the dtype of x, N at most 256; with strides as x.
        dt: (T, H) of any float dtype, any strides.
        a_log, dt_bias: (H,).
        skip: (H,), the D of the paper; None for none.
        states: (S, H, N, P) fp32, or fp64; slots may lie apart, each is dense.
        batch: the sequences and their slots.
        dt_limits: the least and the greatest size of a step, the same for all tokens.
        backend: as `longreach_kernels.resolve_backend` takes it.

    Returns:
        (T, H, P) of x's dtype, contiguous.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or the backend cannot run there.
    """
    inputs = ScanInputs(x, b, c, dt, a_log, skip, dt_bias, states, batch, dt_limits)
    _check(inputs)
    name = resolve_backend(backend, x.device, x.dtype).name
    if name == "reference":
        from longreach_kernels.ssm.reference import ssd_scan as scan
    elif name == "cpu":
        from longreach_kernels.ssm.cpu import ssd_scan as scan
    else:
        if states.dtype != torch.float32:
            raise ValueError(f"states: the kernels take fp32, got {states.dtype}; use backend='reference'")
        from longreach_kernels.ssm.launch import ssd_scan as scan

    return scan(inputs)


def _check(given: ScanInputs) -> None:
    x, b, c = given.x, given.b, given.c
    if x.dim() != 3 or b.dim() != 3 or b.shape[0] != x.shape[0] or c.shape != b.shape:
        raise ValueError(
            "x, b, c: expected (T, H, P) and (T, G, N) twice, "
            f"got {tuple(x.shape)}, {tuple(b.shape)} and {tuple(c.shape)}"
        )
    (tokens, heads, dim), (_, groups, size) = x.shape, b.shape
    if groups == 0 or heads % groups:
        raise ValueError(f"x: {heads} heads cannot share {groups} groups evenly")
    if not 1 <= size <= MAX_STATE_SIZE:
        raise ValueError(f"b: N must lie between 1 and {MAX_STATE_SIZE}, got {size}")
    if not x.dtype == b.dtype == c.dtype:
        raise ValueError(f"x, b, c: need one dtype, got {x.dtype}, {b.dtype} and {c.dtype}")
    for name, tensor in (("x", x), ("b", b), ("c", c)):
        if tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise ValueError(f"{name}: the last dimension must be dense, its stride is {tensor.stride(2)}")
    if given.dt.shape != (tokens, heads):
        raise ValueError(f"dt: expected {(tokens, heads)}, got {tuple(given.dt.shape)}")
    for name, tensor in (("a_log", given.a_log), ("skip", given.skip), ("dt_bias", given.dt_bias)):
        if tensor is not None and (tensor.shape != (heads,) or not tensor.is_contiguous()):
            raise ValueError(f"{name}: expected ({heads},), contiguous, got {tuple(tensor.shape)}")
    least, greatest = given.limits
    if not 0.0 <= least <= greatest:
        raise ValueError(f"dt_limits: expected 0 <= least <= greatest, got {least} and {greatest}")
    check_states(given.states, (heads, size, dim), given.batch, tokens)
    if given.states.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"states: expected fp32, got {given.states.dtype}")
