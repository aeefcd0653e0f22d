"""The write of new keys and values into their pages."""

from __future__ import annotations

from torch import Tensor

from longreach_kernels.backends.reference.page_writes import quantized


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the rows of k and v (T, Hkv, D) to their slots; a slot of -1 is skipped."""
    if bool((slots < 0).any()):
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    k, v = quantized(k, v, k_pages.dtype, kv_scales)
    k_pages.view(-1, *k_pages.shape[2:])[slots] = k
    v_pages.view(-1, *v_pages.shape[2:])[slots] = v
