"""What the rule is told of each token: how much of the state stays, and how much of a change is made."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend


def decay_and_beta(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, beta_scale: float = 1.0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """``-exp(a_log) * softplus(a + dt_bias)`` and ``beta_scale * sigmoid(b)``, for each token and value head.

    Args:
        a, b: (T, Hv), any strides.
        a_log, dt_bias: (Hv,).
        beta_scale: 2 for models whose states may have negative eigenvalues.
        backend: as `longreach_kernels.resolve_backend` takes it.

    Returns:
        log_decay and beta, both (T, Hv) fp32, or fp64 where a is that; not rounded to a's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    if a.dim() != 2 or b.shape != a.shape:
        raise ValueError(f"a, b: expected (T, Hv) twice, got {tuple(a.shape)} and {tuple(b.shape)}")
    for name, tensor in (("a_log", a_log), ("dt_bias", dt_bias)):
        if tensor.shape != a.shape[1:]:
            raise ValueError(f"{name}: expected {tuple(a.shape[1:])}, got {tuple(tensor.shape)}")
    if resolve_backend(backend, a.device, a.dtype).name in ("triton", "hopper"):
        from longreach_kernels.delta.gates_kernel import decay_and_beta as gates

        return gates(a, b, a_log, dt_bias, beta_scale)
    wide = torch.promote_types(a.dtype, torch.float32)
    steps = torch.nn.functional.softplus(a.to(wide) + dt_bias.to(wide))
    return -a_log.to(wide).exp() * steps, beta_scale * b.to(wide).sigmoid()
