"""Rotation of queries and keys before they are rounded to 8 bits (incoherence processing).

Models have channels far larger than the others. A scale for a whole head then leaves few bits to the rest. Random signs
and a Hadamard matrix, an orthonormal map, spread every channel over all of them, and leave Q K^T as it is:
(R q) . (R k) = q . k. QuIP# (Tseng et al. 2024); FlashAttention-3 (Shah et al. 2024), section 3.3.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rotate(x: Tensor, seed: int = 0) -> Tensor:
    """x R, with R = diag(s) H / sqrt(D), s random signs and H the Hadamard matrix of Sylvester's construction.

    Rotate keys before `write_pages` and queries before `paged_attention`, after their position embedding, with one
    seed for all tokens of a cache. Values must not be rotated. Sums are fp32 (fp64 for fp64 inputs).

    Args:
        x: (..., D), floating point; D a power of two.
        seed: of the signs.

    Returns:
        Like x, contiguous.

    Raises:
        ValueError: D is not a power of two, or x is not floating point.
    """
    head_dim = x.shape[-1]
    if not x.dtype.is_floating_point:
        raise ValueError(f"x: needs a floating point dtype, got {x.dtype}")
    if head_dim & (head_dim - 1) or head_dim == 0:
        raise ValueError(f"x: a Hadamard matrix needs a power of two of channels, got {head_dim}; pad them with zeros")
    signs = _signed_hadamard(head_dim, seed, x.dtype, x.device)
    # Entries of one are exact in every dtype; the factor is applied to the sum, which is rounded once.
    rotated = torch.addmm(x.new_zeros(()), x.reshape(-1, head_dim), signs, beta=0, alpha=head_dim**-0.5)
    return rotated.view(x.shape)


@lru_cache(maxsize=32)
def _signed_hadamard(head_dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """diag(s) H, entries 1 and -1, (D, D)."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < head_dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (head_dim, 1), generator=generator) * 2 - 1
    return (signs * matrix).to(device, dtype)
