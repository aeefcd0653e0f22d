"""The portable backend: plain Triton, for compute capability 8.0 and later and for Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.triton.decode import decode_needs, paged_decode
from longreach_kernels.backends.triton.forward_launch import dense_forward as attention
from longreach_kernels.backends.triton.forward_launch import list_tiles, paged_forward
from longreach_kernels.backends.triton.forward_launch import ragged_forward as ragged_attention
from longreach_kernels.backends.triton.page_writes import write_pages
from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks.mask import Mask
from longreach_kernels.masks.tile_lists import TileLists

__all__ = ["attention", "decode_needs", "list_tiles", "paged_attention", "ragged_attention", "write_pages"]


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    lists: TileLists | None = None,
) -> tuple[Tensor, Tensor]:
    """Decodes by the split-KV kernel, the other sequences, or all if there are lists, by the prefill kernel: out like
    q, lse (T, Hq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    options = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits, "kv_scales": kv_scales}
    if lists is not None:
        paged_forward(q, k_pages, v_pages, out, lse, batch, mask, lists=lists, **options)
        return out, lse
    if batch.decodes:
        paged_decode(q, k_pages, v_pages, out, lse, batch, mask, **options)
    if batch.decodes < batch.size:
        paged_forward(q, k_pages, v_pages, out, lse, batch, mask, **options)
    return out, lse
