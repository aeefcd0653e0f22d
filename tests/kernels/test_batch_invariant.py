"""Attention over pages, asked to be batch invariant: a query's bits do not depend on what comes in the same call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from longreach_kernels import Causal, Mask, PagedBatch, Window, paged_attention
from longreach_kernels.backends.hopper import forward_split
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall
from torch import Tensor

from tests.kernels.accuracy import check_paged, paged
from tests.kernels.rowwise import rowwise
from tests.kernels.test_hopper import hopper
from tests.pairwise import daily

FP8 = torch.float8_e4m3fn


def in_chunks(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, sizes: list[int], bound: int, **options: object
) -> Tensor:
    """The last queries of a batch of one sequence, in chunks of these sizes, each in a call with the first `sizes[0]`
    queries of the sequence beside it."""
    start, length = int(batch.context_lens[0]) - q.shape[0], 0
    page_table = torch.nn.functional.pad(
        batch.page_table, (0, -(-bound // k_pages.shape[1]) - batch.page_table.shape[1])
    )
    outs = []
    for size in sizes:
        beside = sizes[0]
        mine = q[length : length + size]
        length += size
        both = PagedBatch(
            torch.tensor([0, beside, beside + size], dtype=torch.int32, device=q.device),
            torch.tensor([start + beside, start + length], dtype=torch.int32, device=q.device),
            page_table.expand(2, -1).contiguous(),
            max_seqlen_q=max(beside, size, 2),
            max_context_len=bound,
        )
        out = paged_attention(torch.cat([q[:beside], mine]), k_pages, v_pages, both, batch_invariant=True, **options)
        outs.append(out[beside:])
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("mask", "head_dim"), [(Window(37, 5), 32), *daily([(Causal(), 32), (Causal(), 512)], 1)], ids=repr
)
def test_chunks_and_neighbours_change_no_bit(
    device: torch.device, mask: Mask, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", rowwise)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k_pages, v_pages, batch = paged([90], [170], 16, 4, 2, head_dim, dtype, device)
    options = {"mask": mask, "backend": "triton"}
    whole = in_chunks(q, k_pages, v_pages, batch, [90], 170, **options)
    for sizes in ([1, 2, 87], [33, 31, 26], [64, 1, 25]):
        assert torch.equal(in_chunks(q, k_pages, v_pages, batch, sizes, 1000, **options), whole)


def test_the_pieces_of_a_batch_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces small enough that one has several sequences, and a sequence several pieces; as the oracle sees them."""
    monkeypatch.setattr(forward_split, "FIXED_KEYS", 64)
    monkeypatch.setattr(forward_split, "_MOST_BYTES", 4 * 5 * 4 * 16 * 40)  # of 40 queries
    q, k_pages, v_pages, batch = paged([1, 1, 70, 0, 9, 33], [90, 4, 300, 20, 9, 133], 16, 4, 2, 16, num_decodes=2)
    whole, _ = reference.paged_attention(q, k_pages, v_pages, batch, AttentionCall(Causal(), scale=0.25))
    pieces = list(forward_split.split_fixed(batch, q, 16, 32))
    assert [piece.rows for piece in pieces] == [slice(n, min(n + 32, 114)) for n in range(2, 114, 32)]
    for rows, piece, room in pieces:
        assert (room.number, room.least_tiles) == (5, 2)
        assert room.out.shape == (5, rows.stop - rows.start, 4, 16)
        assert int(piece.cu_seqlens_q[-1]) == rows.stop - rows.start
        out, _ = reference.paged_attention(q[rows], k_pages, v_pages, piece, AttentionCall(Causal(), scale=0.25))
        torch.testing.assert_close(out, whole[rows])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_backends_of_libraries_are_refused(backend: str) -> None:
    q, k_pages, v_pages, batch = paged([3], [9], 16, 4, 2, 16)
    with pytest.raises(ValueError, match="batch_invariant: needs the backend"):
        paged_attention(q, k_pages, v_pages, batch, backend=backend, batch_invariant=True)


class TestOnHopper:
    pytestmark = hopper

    @pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
    @pytest.mark.parametrize("mask", [Causal(), Window(3000, 4)], ids=repr)
    @pytest.mark.parametrize("fp8", [False, True])
    def test_chunks_and_neighbours_change_no_bit(self, head_dim: int, mask: Mask, fp8: bool) -> None:
        """With more keys than two splits have, and the captured bound of a longer context."""
        context = 2 * forward_split.FIXED_KEYS + 900
        queries = forward_split.FIXED_KEYS + 500
        q, k_pages, v_pages, batch = paged([queries], [context], 128, 4, 2, head_dim, torch.bfloat16, "cuda")
        options: dict[str, object] = {"mask": mask, "backend": "hopper"}
        if fp8:
            scales = torch.full((2,), 0.02, device="cuda")
            k_pages, v_pages = ((x / 0.02).clamp(-448, 448).to(FP8) for x in (k_pages, v_pages))
            options |= {"k_scale": scales, "v_scale": scales}
        whole = in_chunks(q, k_pages, v_pages, batch, [queries], context, **options)
        for sizes in ([130, 2, 1000, queries - 1132], [5000, queries - 5000], [64, 63, 1, 129, queries - 257]):
            cut = in_chunks(q, k_pages, v_pages, batch, sizes, 8 * forward_split.FIXED_KEYS, **options)
            assert torch.equal(cut, whole), sizes

    def test_what_needs_no_splits_is_the_same_with_room_for_them(self) -> None:
        q, k_pages, v_pages, batch = paged([700], [3000], 128, 8, 2, 128, torch.bfloat16, "cuda")
        few, many = (in_chunks(q, k_pages, v_pages, batch, [700], bound, backend="hopper") for bound in (3000, 1 << 17))
        assert torch.equal(few, many)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_splits_of_fixed_size_are_right(self, head_dim: int) -> None:
        queries, contexts = [1, 700, 5, 64, 300], [300, 20_000, 9_001, 64, 16_500]
        q, k_pages, v_pages, batch = paged(
            queries, contexts, 128, 4, 2, head_dim, torch.bfloat16, "cuda", num_decodes=1
        )
        out, lse = paged_attention(q, k_pages, v_pages, batch, backend="hopper", return_lse=True, batch_invariant=True)
        check_paged(out, lse, q, k_pages, v_pages, batch, Causal())
