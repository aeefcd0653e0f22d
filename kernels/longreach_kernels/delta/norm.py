"""The norm after the rule, and its gate: checked arguments, and the form that computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend


def gated_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, *, gate_first: bool = False, backend: str = "auto"
) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight * silu(gate)`` by head, in fp32, rounded once.

    With `gate_first` what is normalised is ``x * silu(gate)``, as after the states of Mamba-2 (Dao and Gu 2024), where
    a "head" is a group of heads.

    Args:
        x: (T, H, D), any strides, but channels are neighbours.
        gate: as x; None for a norm alone.
        weight: (D,), shared by the heads, or (H, D); contiguous.
        eps: what keeps a norm of zeros finite.
        backend: as `longreach_kernels.resolve_backend` takes it.

    Returns:
        (T, H, D) of x's dtype, contiguous.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    for name, tensor in (("x", x), ("gate", gate)):
        if tensor is None:
            continue
        if tensor.dim() != 3 or tensor.shape != x.shape:
            raise ValueError(f"{name}: expected (T, H, D) as x, got {tuple(tensor.shape)}")
        if tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise ValueError(f"{name}: the last dimension must be dense, its stride is {tensor.stride(2)}")
    if weight.shape not in (x.shape[1:], x.shape[2:]) or not weight.is_contiguous():
        raise ValueError(
            f"weight: expected {tuple(x.shape[2:])} or {tuple(x.shape[1:])}, contiguous, got {tuple(weight.shape)}"
        )
    name = resolve_backend(backend, x.device, x.dtype).name
    if name in ("triton", "hopper"):
        from longreach_kernels.delta.norm_kernel import gated_norm as norm

        return norm(x, gate, weight, eps, gate_first)
    return in_torch(x, gate, weight, eps, torch.float64 if name == "reference" else torch.float32, gate_first)


def in_torch(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, gate_first: bool = False
) -> Tensor:
    """As `gated_norm`, computed in `dtype`, or in fp64 where x is that."""
    wide = x.to(torch.promote_types(x.dtype, dtype))
    factor = 1.0 if gate is None else torch.nn.functional.silu(gate.to(wide.dtype))
    wide = wide * factor if gate_first else wide
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (out if gate_first else out * factor).to(x.dtype)
