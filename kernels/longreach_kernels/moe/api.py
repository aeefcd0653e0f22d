"""The product of tokens with their experts: checked arguments, and the form that computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.moe.experts import Experts


def experts_product(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    layer: Experts,
    *,
    add_to: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
    batch_invariant: bool = False,
) -> Tensor:
    """scale * sum of weights[t, j] * expert[experts[t, j]](x[t]) over j, for each token t.

    The same arguments give the same bits. A token's k results are rounded to x's dtype, and summed in fp32 in the order
    of its experts; on a CPU they are not rounded, and summed in the order of the experts' numbers. On a GPU nothing
    waits for the host.

    Args:
        x: (T, C), contiguous.
        experts: (T, k), int32 or int64; what is not among the layer's experts is skipped.
        weights: (T, k), fp32 or x's dtype.
        add_to: (T, C), to which the sum is added in place, rounded once, and which is returned.
        scale: what the sum is multiplied by.
        backend: as `longreach_kernels.resolve_backend` takes it.
        batch_invariant: whether a token's bits may not depend on the other tokens, nor on how many there are. Steps of
            few tokens are slower then.

    Returns:
        (T, C) of x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit, or the backend is not batch invariant.
    """
    _check(x, experts, weights, layer, add_to)
    name = resolve_backend(backend, x.device, x.dtype).name
    if name in ("reference", "cpu"):
        if batch_invariant:
            raise ValueError(
                f"batch_invariant: the backend {name!r} sums in an order that depends on the number of rows; use "
                "'triton' or 'hopper' on a GPU"
            )
        if name == "reference":
            from longreach_kernels.moe.reference import experts_product as product
        else:
            from longreach_kernels.moe.cpu import experts_product as product

        total = product(x, experts, weights, layer)
        if add_to is None:
            return (total if scale == 1.0 else total * scale).to(x.dtype)
        return add_to.copy_(add_to + scale * total)
    from longreach_kernels.moe.launch import experts_product as product_on_gpu

    return product_on_gpu(x, experts, weights, layer, add_to, scale, batch_invariant)


def _check(x: Tensor, experts: Tensor, weights: Tensor, layer: Experts, add_to: Tensor | None) -> None:
    if x.dim() != 2 or x.shape[1] != layer.gate_up.shape[2]:
        raise ValueError(f"x: expected (T, {layer.gate_up.shape[2]}), got {tuple(x.shape)}")
    if experts.dim() != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(f"experts: expected ({x.shape[0]}, k), got {tuple(experts.shape)}")
    if experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"experts: expected int32 or int64, got {experts.dtype}")
    if weights.shape != experts.shape:
        raise ValueError(f"weights: expected {tuple(experts.shape)} as experts, got {tuple(weights.shape)}")
    if add_to is not None and (add_to.shape != x.shape or add_to.dtype != x.dtype):
        raise ValueError(f"add_to: expected {tuple(x.shape)} of {x.dtype}, got {tuple(add_to.shape)} of {add_to.dtype}")
