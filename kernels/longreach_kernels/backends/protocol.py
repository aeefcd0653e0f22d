"""What a backend computes. Each folder beside this file has one, in its `backend.py`.

Shapes are those of the public functions (`longreach_kernels.api`, `longreach_kernels.paged_api`), which check them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from longreach_kernels.batch import DecodeNeeds, PagedBatch
from longreach_kernels.call import AttentionCall


class CuSeqlens(NamedTuple):
    """Where each sequence of a ragged batch starts: two int32 tensors (B + 1,) on the device of the queries."""

    q: Tensor
    k: Tensor


class Saved(NamedTuple):
    """What a forward pass keeps for its backward pass: its inputs and results, in its shapes; of a ragged batch where
    its sequences start, too."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_seqlens: CuSeqlens | None


class AttentionBackend(Protocol):
    """Attention on one kind of device.

    Attributes:
        takes_any_tiles: whether lists may be of any tiles, and not only of those that `list_tiles` says.
        batch_invariant: whether a result can be made independent of the rest of its batch.
    """

    @property
    def takes_any_tiles(self) -> bool: ...

    @property
    def batch_invariant(self) -> bool: ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """q (B, Hq, Nq, D), k, v (B, Hkv, Nk, D): out like q, contiguous, and lse (B, Hq, Nq)."""
        ...

    def ragged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """q (Tq, Hq, D), k, v (Tk, Hkv, D): out like q, contiguous, and lse (Tq, Hq)."""
        ...

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """q (T, Hq, D), k_pages, v_pages (P, page_size, Hkv, D): out like q, contiguous, and lse (T, Hq)."""
        ...

    def write_pages(
        self,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slots: Tensor,
        kv_scales: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Write the rows of k and v (T, Hkv, D) to their slots (T,) int64; a slot of -1 is skipped."""
        ...

    def list_tiles(self, q: Tensor, k_pages: Tensor) -> tuple[int, int]:
        """Queries and keys of a tile of the lists that `paged_attention` takes for such tensors."""
        ...

    def decode_needs(self, q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
        """What a causal decode of ``num_seqs`` sequences with at most ``max_context_len`` keys needs."""
        ...


class DifferentiableBackend(AttentionBackend, Protocol):
    """A backend whose dense and ragged attention has a backward pass of its own."""

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv like q, k, v, contiguous, and ``delta = rowsum(grad_out * out) - grad_lse`` like lse.

        The gradient of sink logits follows from delta. ``grad_lse`` None stands for zeros.
        """
        ...
