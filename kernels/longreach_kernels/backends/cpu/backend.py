"""The CPU backend: torch's own flash kernel, tile by tile."""

from __future__ import annotations

from torch import Tensor

from longreach_kernels.backends.cpu import forward, page_writes
from longreach_kernels.backends.cpu.backward import backward
from longreach_kernels.backends.protocol import CuSeqlens, Saved
from longreach_kernels.batch import DecodeNeeds, PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.sizes import TILE


class CpuBackend:
    """Attention of tensors on a CPU."""

    takes_any_tiles = True
    batch_invariant = False

    def attention(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attention`."""
        return forward.attention(q, k, v, call)

    def ragged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.ragged_attention`."""
        return forward.ragged_attention(q, k, v, cu_seqlens, call)

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.paged_attention`."""
        return forward.paged_attention(q, k_pages, v_pages, batch, call)

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
        """See `AttentionBackend.list_tiles`; lists of other tiles serve as well."""
        return TILE, TILE

    def decode_needs(self, q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
        """Nothing that is worth counting: sequences are computed one after the other."""
        return DecodeNeeds(0, by_length=True)


BACKEND = CpuBackend()
