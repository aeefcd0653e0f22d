"""The norm after the rule, and its gate: checked arguments, and the form that computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend


def gated_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight * silu(gate)`` by head, in fp32, rounded once.

    Args:
        x: (T, H, D), any strides, but channels are neighbours.
        gate: as x; None for a norm alone.
        weight: (D,), shared by the heads.
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
    if weight.shape != x.shape[2:]:
        raise ValueError(f"weight: expected {tuple(x.shape[2:])}, got {tuple(weight.shape)}")
    name = resolve_backend(backend, x.device, x.dtype).name
    if name in ("triton", "hopper"):
        from longreach_kernels.delta.norm_kernel import gated_norm as norm

        return norm(x, gate, weight, eps)
    return in_torch(x, gate, weight, eps, torch.float64 if name == "reference" else torch.float32)


def in_torch(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As `gated_norm`, computed in `dtype`, or in fp64 where x is that."""
    wide = x.to(torch.promote_types(x.dtype, dtype))
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    if gate is not None:
        out = out * torch.nn.functional.silu(gate.to(wide.dtype))
    return out.to(x.dtype)
