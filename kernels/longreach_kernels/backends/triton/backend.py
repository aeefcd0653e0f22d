"""The portable backend: plain Triton, for compute capability 8.0 and later and for Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.protocol import CuSeqlens, Saved
from longreach_kernels.backends.triton import decode_launch, forward_launch, page_writes
from longreach_kernels.backends.triton.backward_launch import backward
from longreach_kernels.batch import DecodeNeeds, PagedBatch
from longreach_kernels.call import AttentionCall


class TritonBackend:
    """Plain Triton kernels. None of them has a way that is not batch invariant."""

    takes_any_tiles = False
    batch_invariant = True

    def attention(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attention`."""
        return forward_launch.dense_forward(q, k, v, call)

    def ragged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.ragged_attention`."""
        return forward_launch.ragged_forward(q, k, v, cu_seqlens, call)

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Decodes by the split-KV kernel; the other sequences, or all if there are lists, by the prefill kernel."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if call.lists is None and batch.decodes:
            decode_launch.paged_decode(q, k_pages, v_pages, out, lse, batch, call)
        if call.lists is not None or batch.decodes < batch.size:
            forward_launch.paged_forward(q, k_pages, v_pages, out, lse, batch, call)
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
        return forward_launch.list_tiles(q, k_pages)

    def decode_needs(self, q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
        """See `AttentionBackend.decode_needs`."""
        return decode_launch.decode_needs(q, k_pages, num_seqs, max_context_len)


BACKEND = TritonBackend()
