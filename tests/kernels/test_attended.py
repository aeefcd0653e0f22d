"""Scores of blocks by the attention of a few queries, against fp64."""

from __future__ import annotations

import pytest
import torch
from longreach_kernels import PagedBatch
from longreach_kernels.sparse import add_block_scores
from longreach_kernels.sparse.decode import attended_kernels
from torch import Tensor

from tests.kernels.accuracy import FP8, paged

LENGTHS = [300, 16, 0, 129, 47, 1]
BLOCKS = 20  # one more than the longest sequence has
HERE = ["cpu", "triton"]


def exact(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    scale: float,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
    **given: Tensor,
) -> Tensor:
    """(R, blocks), computed eagerly in `dtype`."""
    found = torch.zeros(len(q), BLOCKS, dtype=dtype, device=q.device)
    for row, length in enumerate(batch.context_lens.tolist()):
        pages = batch.page_table[row, : -(-length // k_pages.shape[1])].long()
        keys = k_pages[pages].flatten(0, 1)[:length].to(dtype)
        if "k_scale" in given:
            keys = keys * given["k_scale"].to(dtype)[:, None]
        keys = keys.repeat_interleave(q.shape[1] // k_pages.shape[2], 1)
        logits = torch.einsum("hd,nhd->hn", q[row].to(dtype), keys) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if "sink_logits" in given:
            logits = torch.cat([logits, given["sink_logits"].to(dtype)[:, None]], 1)
        for key, share in enumerate(torch.softmax(logits, -1)[:, :length].split(16, 1)):
            found[row, key] = share.sum(1).square().sum()
    return found


def check(q: Tensor, k_pages: Tensor, batch: PagedBatch, backend: str = "auto", scale: float = 0.3, **given) -> None:
    """Twice the error of eager attention in fp32 is excused, and a rounding of the greatest score for each head."""
    scores = torch.full((len(q), BLOCKS), 0.5, device=q.device)
    add_block_scores(q, k_pages, batch, scores, scale=scale, backend=backend, **given)
    wanted = exact(q, k_pages, batch, scale, **given)
    eager = exact(q, k_pages, batch, scale, dtype=torch.float32, **given)
    rounding = 2 * (eager.double() - wanted).abs().max() + q.shape[1] * wanted.max() * torch.finfo(torch.float32).eps
    assert (scores.double() - 0.5 - wanted).abs().max() <= rounding
    assert wanted.sum() > 1


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(("page_size", "head_dim"), [(32, 16), (16, 24), (128, 64)])
def test_scores_are_squared_shares_of_the_softmax(backend: str, page_size: int, head_dim: int) -> None:
    q, k_pages, _, batch = paged([1] * len(LENGTHS), LENGTHS, page_size, 6, 2, head_dim)
    check(q, k_pages, batch, backend)


@pytest.mark.parametrize("backend", HERE)
def test_softcap_sinks_and_scales_count(backend: str) -> None:
    q, k_pages, _, batch = paged([1] * len(LENGTHS), LENGTHS, 32, 4, 2, 16)
    check(q, k_pages, batch, backend, softcap=1.5, sink_logits=torch.randn(4))
    check(q, k_pages.to(FP8), batch, backend, k_scale=torch.tensor([0.5, 1.25]))


def test_queries_are_taken_in_runs_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k_pages, _, batch = paged([1] * len(LENGTHS), LENGTHS, 32, 4, 2, 16)
    monkeypatch.setattr(attended_kernels, "_MOST_BYTES", 2 * 4 * 4 * 19)
    check(q, k_pages, batch, "triton")
    monkeypatch.setattr(attended_kernels, "_MOST_BYTES", 1)
    check(q, k_pages, batch, "triton")


def test_what_does_not_fit_is_refused() -> None:
    q, k_pages, _, batch = paged([1] * len(LENGTHS), LENGTHS, 32, 4, 2, 16)
    scores = torch.zeros(len(q), BLOCKS)
    for wrong, named in (
        ((q[:2], k_pages, batch, scores), "batch"),
        ((q, k_pages[..., :8], batch, scores), "k_pages"),
        ((q, k_pages[:, :8], batch, scores), "k_pages"),
        ((q, k_pages, batch, scores.double()), "scores"),
        ((q, k_pages, batch, scores[:, :3].contiguous()), "scores"),
    ):
        with pytest.raises(ValueError, match=f"^{named}:"):
            add_block_scores(*wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (4, 1, 256), (9, 3, 64)])
def test_scores_on_a_gpu(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    q, k_pages, _, batch = paged([1] * len(LENGTHS), LENGTHS, 128, heads, kv_heads, head_dim, device="cuda")
    q, k_pages = q.bfloat16() if dtype == FP8 else q.to(dtype), k_pages.to(dtype)
    given = {"k_scale": torch.full((kv_heads,), 0.75, device="cuda")} if dtype == FP8 else {}
    check(q, k_pages, batch, scale=0.1, **given)
