"""The Hopper backend: Gluon kernels for sm_90 where they exist, the portable kernels for everything else.

`forward_launch.supports` says what the Gluon forward kernel computes, `decode_launch.supports` what the decode kernel
does; the portable kernels, which run on this GPU too, compute the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from longreach_kernels.backends import triton as portable
from longreach_kernels.backends.hopper import decode_launch
from longreach_kernels.backends.hopper import forward_launch as launch
from longreach_kernels.backends.triton import forward_launch as portable_launch
from longreach_kernels.backends.triton import write_pages
from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks.mask import Causal, Mask
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.needs import DecodeNeeds

__all__ = ["attention", "decode_needs", "list_tiles", "paged_attention", "ragged_attention", "write_pages"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, Hq, Nq, D), k, v (B, Hkv, Nk, D): out like q, lse (B, Hq, Nq) fp32."""
    if launch.supports(q, k, mask):
        return launch.dense_forward(q, k, v, mask, scale=scale, softcap=softcap, sink_logits=sink_logits)
    return portable.attention(q, k, v, mask, scale=scale, softcap=softcap, sink_logits=sink_logits)


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q (Tq, Hq, D), k, v (Tk, Hkv, D): out like q, lse (Tq, Hq) fp32."""
    if launch.supports(q, k, mask):
        return launch.ragged_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, mask, scale=scale, softcap=softcap, sink_logits=sink_logits
        )
    return portable.ragged_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, mask, scale=scale, softcap=softcap, sink_logits=sink_logits
    )


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
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decodes and the other sequences, each by the Hopper kernel where it can, else by the portable one. If there are
    lists, all sequences by the prefill kernel. Only the Hopper prefill kernel has a way that is not batch invariant."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    options = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits}
    if lists is not None:
        prefill = _list_module(q, k_pages)
        prefill.paged_forward(q, k_pages, v_pages, out, lse, batch, mask, kv_scales=kv_scales, lists=lists, **options)
        return out, lse
    options["kv_scales"] = kv_scales

    def compute_decodes() -> None:
        if batch.decodes:
            module = decode_launch if decode_launch.supports(q, k_pages, v_pages, mask) else portable
            module.paged_decode(q, k_pages, v_pages, out, lse, batch, mask, **options)

    def compute_prefill() -> None:
        if batch.decodes == batch.size:
            return
        if launch.supports(q, k_pages, mask, page_size=k_pages.shape[1]):
            launch.paged_forward(q, k_pages, v_pages, out, lse, batch, mask, batch_invariant=batch_invariant, **options)
        else:
            portable.paged_forward(q, k_pages, v_pages, out, lse, batch, mask, **options)

    if 0 < batch.decodes < batch.size and torch.cuda.is_current_stream_capturing():
        _side_by_side(q.device, compute_decodes, compute_prefill)
    else:
        compute_decodes()
        compute_prefill()
    return out, lse


def _side_by_side(device: torch.device, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Let a CUDA graph run two kernels that do not depend on each other in any order: each fills the multiprocessors
    that the other one's last round leaves idle."""
    stream, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        first()
    second()
    stream.wait_stream(side)


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def list_tiles(q: Tensor, k_pages: Tensor) -> tuple[int, int]:
    """Queries and keys of a tile of the lists that `paged_attention` takes."""
    return _list_module(q, k_pages).list_tiles(q, k_pages)


def decode_needs(q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
    """What the kernel needs that computes a causal decode of such tensors."""
    if decode_launch.supports(q, k_pages, k_pages, Causal()):
        return decode_launch.decode_needs(q, num_seqs, max_context_len)
    return portable.decode_needs(q, k_pages, num_seqs, max_context_len)


def _list_module(q: Tensor, k_pages: Tensor) -> ModuleType:
    return launch if launch.supports(q, k_pages, None, page_size=k_pages.shape[1]) else portable_launch
