"""The write of new keys and values into their pages, as the specification says it."""

from __future__ import annotations

import torch
from torch import Tensor


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the rows of k and v (T, Hkv, D) to their slots; a slot of -1 is skipped."""
    kept = slots >= 0
    index = slots[kept]
    k, v = quantized(k[kept], v[kept], k_pages.dtype, kv_scales)
    k_pages.view(-1, *k_pages.shape[2:])[index] = k
    v_pages.view(-1, *v_pages.shape[2:])[index] = v


def quantized(
    k: Tensor, v: Tensor, dtype: torch.dtype, kv_scales: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """k and v (T, Hkv, D) in the dtype of pages: divided by their heads' scales, and clamped to what fp8 holds."""
    if kv_scales is None:
        return k.to(dtype), v.to(dtype)
    limit = torch.finfo(dtype).max
    k, v = ((x.float() / s[:, None]).clamp(-limit, limit).to(dtype) for x, s in zip((k, v), kv_scales, strict=True))
    return k, v
