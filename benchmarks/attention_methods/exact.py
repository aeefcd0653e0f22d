"""Exact softmax attention of a few rows in float64, which every method's output is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *, causal: bool = True, scale: float, exclude_self: bool = False
) -> Tensor:
    """softmax(scale · QKᵀ) V at the queries ``rows``.

    Args:
        q, k, v: (B, H, N, D), any floating point dtype.
        rows: (R,) int64, which queries.
        causal: whether a query sees the keys at or before it, or all.
        scale: factor of the logits.
        exclude_self: whether a query does not see its own key, except where there is no other.

    Returns:
        (B, H, R, D) float64.
    """
    heads = []
    at = torch.arange(k.shape[2], device=k.device)
    hidden = at > rows[:, None] if causal else torch.zeros(len(rows), len(at), dtype=torch.bool, device=k.device)
    if exclude_self:
        hidden = hidden | ((at == rows[:, None]) & (rows[:, None] > 0))
    for head in range(q.shape[1]):  # float64 copies of all heads at once would not fit beside what is measured
        logits = scale * q[:, head, rows].double() @ k[:, head].double().mT
        heads.append(logits.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, head].double())
    return torch.stack(heads, 1)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Frobenius norm of ``out - exact`` over that of ``exact``; both (B, H, R, D)."""
    return ((out.double() - exact).norm() / exact.norm()).item()
