"""The attention that sparse attention kept, against all of it in fp64."""

from __future__ import annotations

import pytest
import torch
from longreach_kernels import Causal, Window, paged_attention
from longreach_kernels.masks.listed_mask import listed_masks
from longreach_kernels.sparse import Density, kept_mass, kept_share, select_tiles
from torch import Tensor

from tests.kernels.accuracy import paged
from tests.pairwise import thinned

LENGTHS = {
    "triton": ([1, 100, 64, 150], [90, 180, 64, 230]),
    "cpu": ([1, 300, 64, 450], [300, 700, 64, 900]),  # whose tiles are larger
}


def in_fp64(q: Tensor, k: Tensor, seen: Tensor, dense: Tensor, sinks: Tensor | None, softcap: float | None) -> Tensor:
    """(n, Hq): weight of the seen keys over that of all; q (n, Hq, D), k (N, Hkv, D), seen (Hq, n, N), dense (n, N)."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("nhd,khd->hnk", q.double(), k) * 0.7
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = logits.exp()
    sink = 0.0 if sinks is None else sinks.double().exp()[:, None]
    return (((weights * seen).sum(-1) + sink) / ((weights * dense).sum(-1) + sink)).T


@pytest.mark.parametrize(
    ("backend", "window", "options"),
    thinned(
        ["cpu", "triton"],
        [None, 100],
        [{}, {"softcap": 3.0, "sink_logits": torch.linspace(0.0, 3.0, 4)}],
        count=1,
    ),
    ids=str,
)
def test_it_is_what_the_kept_keys_weigh(backend: str, window: int | None, options: dict) -> None:
    lengths = LENGTHS[backend]
    q, k_pages, v_pages, batch = paged(*lengths, 16, 4, 2, 16, num_decodes=1)
    none = {"local": 0, "tail": 0, "dense_below": 0}
    softcap = options.get("softcap")
    lists = select_tiles(
        q, k_pages, batch, target=Density(0.3), window=window, backend=backend, softcap=softcap, **none
    )
    options = options | {"scale": 0.7, "backend": backend}
    _, lse = paged_attention(q, k_pages, v_pages, batch, lists=lists, return_lse=True, **options)
    rows = torch.cat([torch.tensor([0]), torch.randperm(len(q) - 1)[:80].sort()[0] + 1])
    got = kept_mass(q, k_pages, v_pages, batch, lse, rows, window=window, **options)
    assert got.shape == (81, 4)
    starts, expected = batch.cu_seqlens_q.tolist(), []
    for b, meant in enumerate(listed_masks(lists, *lengths)):
        queries, keys = lengths[0][b], lengths[1][b]
        positions = torch.arange(keys - queries, keys), torch.arange(keys)
        k = k_pages[batch.page_table[b, : -(-keys // 16)].long()].flatten(0, 1)[:keys]
        dense = (Causal() if window is None else Window(window)).allowed(*positions)
        seen = meant.allowed(*positions).repeat_interleave(2, 0)
        own = q[starts[b] : starts[b + 1]]
        expected.append(in_fp64(own, k, seen, dense, options.get("sink_logits"), softcap))
    expected = torch.cat(expected)[rows]
    assert expected.min() < 0.7
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


def test_dense_attention_keeps_all_of_it() -> None:
    q, k_pages, v_pages, batch = paged(*LENGTHS["cpu"], 16, 4, 2, 16, num_decodes=1)
    _, lse = paged_attention(q, k_pages, v_pages, batch, return_lse=True)
    got = kept_mass(q, k_pages, v_pages, batch, lse, torch.arange(len(q)))
    torch.testing.assert_close(got, torch.ones_like(got), atol=1e-5, rtol=0)
    assert kept_mass(q, k_pages, v_pages, batch, lse, torch.arange(0)).shape == (0, 4)


def test_a_share_is_never_above_1_and_is_1_where_there_is_nothing_to_lose() -> None:
    infinity = float("inf")
    lse, dense = torch.tensor([-infinity, -infinity, 1e-7, -2.0]), torch.tensor([-infinity, 3.0, 0.0, 0.0])
    torch.testing.assert_close(kept_share(lse, dense), torch.tensor([1.0, 0.0, 1.0, 0.1353353]))


def test_bad_arguments_are_named() -> None:
    q, k_pages, v_pages, batch = paged([3], [9], 8, 4, 2, 16)
    _, lse = paged_attention(q, k_pages, v_pages, batch, return_lse=True)
    for name, arguments in {
        "rows": (lse, torch.ones(2)),
        "lse": (lse[:, :1], torch.arange(2)),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            kept_mass(q, k_pages, v_pages, batch, *arguments)
    with pytest.raises(ValueError, match=r"^window: "):
        kept_mass(q, k_pages, v_pages, batch, lse, torch.arange(2), window=0)
