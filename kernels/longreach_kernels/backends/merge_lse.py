"""Results over parts of the keys, joined exactly by their log-sum-exp."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the same rows to two disjoint sets of keys, as attention to both.

    Each part weighs ``exp(lse_i - lse)`` with ``lse = log(exp(lse_1) + exp(lse_2))``; that is 0 for a part in which a
    row saw nothing, whose lse is -inf.

    Args:
        out, out2: (..., D); the products are computed in the wider of their own dtype and that of lse.
        lse, lse2: (...), fp32 or fp64.

    Returns:
        out (..., D) and lse (...), new tensors.
    """
    total = torch.logaddexp(lse, lse2)
    base = total.masked_fill(total == -math.inf, 0.0)
    out = out * torch.exp(lse - base)[..., None] + out2 * torch.exp(lse2 - base)[..., None]
    return out, total
