"""Linformer: keys and values projected along the sequence to a fixed number of rows. Not causal."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=32)
def projections(length: int, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """E and F, (rows, length) each: Gaussian with variance 1/rows, as in the proof of the paper's theorem 2. A trained
    Linformer has learned ones."""
    generator = torch.Generator().manual_seed(length)
    e, f = (torch.randn(rows, length, generator=generator) / rows**0.5 for _ in range(2))
    return e.to(device, dtype), f.to(device, dtype)


def linformer(q: Tensor, k: Tensor, v: Tensor, rows: int = 256) -> Tensor:
    """softmax(Q (EK)ᵀ / sqrt(D)) FV (Wang et al. 2020, equation 7); every query sees all of the sequence.

    Args:
        q, k, v: (B, H, N, D).
        rows: what the length is projected to.

    Returns:
        Like q.
    """
    e, f = projections(k.shape[2], rows, k.device, k.dtype)
    scores = q @ (e @ k).mT * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ (f @ v)
