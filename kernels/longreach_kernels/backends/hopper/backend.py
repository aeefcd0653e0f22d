"""The Hopper backend: Gluon kernels for sm_90 where they exist, the portable kernels for everything else.

`forward_launch.supports` says what the Gluon forward kernel computes, `decode_launch.supports` what the decode kernel
does; the portable kernels, which run on this GPU too, compute the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from longreach_kernels.backends.hopper import decode_launch, forward_launch
from longreach_kernels.backends.hopper.backward_launch import backward
from longreach_kernels.backends.protocol import CuSeqlens, Saved
from longreach_kernels.backends.triton import decode_launch as portable_decode_launch
from longreach_kernels.backends.triton import forward_launch as portable_forward_launch
from longreach_kernels.backends.triton import page_writes
from longreach_kernels.batch import DecodeNeeds, PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.mask import Causal


class HopperBackend:
    """Gluon kernels, and portable ones. Only the Gluon prefill kernel has a way that is not batch invariant."""

    takes_any_tiles = False
    batch_invariant = True

    def attention(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attention`."""
        if forward_launch.supports(q, k, call.mask):
            return forward_launch.dense_forward(q, k, v, call)
        return portable_forward_launch.dense_forward(q, k, v, call)

    def ragged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.ragged_attention`."""
        if forward_launch.supports(q, k, call.mask):
            return forward_launch.ragged_forward(q, k, v, cu_seqlens, call)
        return portable_forward_launch.ragged_forward(q, k, v, cu_seqlens, call)

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Decodes and the other sequences, each by the Hopper kernel where it can, else by the portable one. If there
        are lists, all sequences by the prefill kernel."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        decodes = batch.decodes if call.lists is None else 0

        def compute_decodes() -> None:
            if decode_launch.supports(q, k_pages, v_pages, call.mask):
                decode_launch.paged_decode(q, k_pages, v_pages, out, lse, batch, call)
            else:
                portable_decode_launch.paged_decode(q, k_pages, v_pages, out, lse, batch, call)

        def compute_prefill() -> None:
            mask = call.mask if call.lists is None else None
            if forward_launch.supports(q, k_pages, mask, page_size=k_pages.shape[1]):
                forward_launch.paged_forward(q, k_pages, v_pages, out, lse, batch, call)
            else:
                portable_forward_launch.paged_forward(q, k_pages, v_pages, out, lse, batch, call)

        if 0 < decodes < batch.size and torch.cuda.is_current_stream_capturing():
            _side_by_side(q.device, compute_decodes, compute_prefill)
            return out, lse
        if decodes:
            compute_decodes()
        if call.lists is not None or decodes < batch.size:
            compute_prefill()
        return out, lse

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `DifferentiableBackend.backward`."""
        return backward(grad_out, grad_lse, saved, call)

    def write_pages(
        self,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slots: Tensor,
        kv_scales: tuple[Tensor, Tensor] | None,
    ) -> None:
        """See `AttentionBackend.write_pages`."""
        page_writes.write_pages(k, v, k_pages, v_pages, slots, kv_scales)

    def list_tiles(self, q: Tensor, k_pages: Tensor) -> tuple[int, int]:
        """See `AttentionBackend.list_tiles`."""
        if forward_launch.supports(q, k_pages, None, page_size=k_pages.shape[1]):
            return forward_launch.list_tiles(q, k_pages)
        return portable_forward_launch.list_tiles(q, k_pages)

    def decode_needs(self, q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
        """See `AttentionBackend.decode_needs`, of the kernel that computes it."""
        if decode_launch.supports(q, k_pages, k_pages, Causal()):
            return decode_launch.decode_needs(q, k_pages, num_seqs, max_context_len)
        return portable_decode_launch.decode_needs(q, k_pages, num_seqs, max_context_len)


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


BACKEND = HopperBackend()
