"""Lists that a caller brings in place of a mask."""

from dataclasses import replace

import pytest
import torch
from longreach_kernels import Causal, PagedBatch, TileLists, Window, debug, list_tiles, paged_attention
from longreach_kernels.masks.listed_mask import listed_masks
from longreach_kernels.masks.tile_lists import ragged_tile_lists
from torch import Tensor

from tests.kernels.accuracy import check_paged, paged
from tests.kernels.patterns_for_tests import LENGTH, LISTED
from tests.pairwise import thinned

BACKENDS = ["reference", "cpu", "triton"]
LENGTHS = ([1, 40, 77, 1, LENGTH], [LENGTH, 40, 130, 33, LENGTH])


def batch_of(kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    return paged(*LENGTHS, 16, 4, kv_heads, 16, num_decodes=1)


def lists_for(mask, q: Tensor, k_pages: Tensor, backend: str) -> TileLists:
    return ragged_tile_lists(mask, *LENGTHS, *list_tiles(q, k_pages, backend=backend))


@pytest.mark.parametrize(("name", "backend"), thinned(LISTED, BACKENDS, count=3, strength=1))
def test_they_see_what_the_mask_they_were_made_of_does(name: str, backend: str) -> None:
    mask = LISTED[name]
    q, k_pages, v_pages, batch = batch_of()
    lists = lists_for(mask, q, k_pages, backend)
    out, lse = paged_attention(q, k_pages, v_pages, batch, lists=lists, backend=backend, return_lse=True)
    check_paged(out, lse.float(), q, k_pages, v_pages, batch, mask)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"sink_logits": torch.linspace(-2.0, 3.0, 4)}], ids=str)
def test_softcap_and_learned_sinks(options: dict, backend: str) -> None:
    mask = LISTED["bigbird"]
    q, k_pages, v_pages, batch = batch_of()
    lists = lists_for(mask, q, k_pages, backend)
    out, lse = paged_attention(q, k_pages, v_pages, batch, lists=lists, backend=backend, return_lse=True, **options)
    check_paged(out, lse.float(), q, k_pages, v_pages, batch, mask, **options)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_cpu_shares_a_list_among_any_number_of_heads(kv_heads: int) -> None:
    q, k_pages, v_pages, batch = batch_of(kv_heads)
    for mask in (LISTED["bigbird"], LISTED["strided"]):  # two heads, and one
        lists = ragged_tile_lists(mask, *LENGTHS, 64, 32)
        out, lse = paged_attention(q, k_pages, v_pages, batch, lists=lists, backend="cpu", return_lse=True)
        check_paged(out, lse, q, k_pages, v_pages, batch, mask)


@pytest.mark.parametrize("tiles", [(32, 32), (128, 64), (16, 128)])
def test_lists_mean_the_pairs_of_their_mask(tiles: tuple[int, int]) -> None:
    for mask in LISTED.values():
        lists = ragged_tile_lists(mask, *LENGTHS, *tiles)
        for meant, queries, keys in zip(listed_masks(lists, *LENGTHS), *LENGTHS, strict=True):
            positions = torch.arange(keys - queries, keys), torch.arange(keys)
            seen = mask.allowed(*positions)
            assert torch.equal(meant.allowed(*positions).view(-1, queries, keys), seen.view(-1, queries, keys))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"tiles": x.tiles.long()}, "needs a contiguous int32 tensor tiles"),
        (lambda x: {"first_row": x.first_row[:-1]}, r"needs first_row \(5,\)"),
        (lambda x: {"start": x.start[:-1]}, "rows in partial need"),
        (lambda x: {"order": x.order[:-1]}, "rows in partial need"),
        (lambda x: {"bit_index": x.bit_index[:-1]}, "one bit_index an entry"),
        (lambda x: {"bits": x.bits[:, :-1].contiguous()}, r"needs bits \(tables, 32, 1\)"),
        (lambda x: {"heads": 3}, "the 3 heads that they tell apart do not divide the 4"),
        (lambda x: {"tile_q": 64}, "takes tiles of 32 queries and 32 keys here, got 64 and 32"),
    ],
)
def test_what_does_not_fit_is_named(change, message: str) -> None:
    q, k_pages, v_pages, batch = batch_of()
    lists = lists_for(LISTED["strided"], q, k_pages, "triton")
    with pytest.raises(ValueError, match=f"^lists: .*{message}"):
        paged_attention(q, k_pages, v_pages, batch, lists=replace(lists, **change(lists)), backend="triton")


def test_a_mask_beside_lists_is_refused() -> None:
    q, k_pages, v_pages, batch = batch_of()
    lists = lists_for(Causal(), q, k_pages, "cpu")
    with pytest.raises(ValueError, match=r"^mask: the lists say what is seen"):
        paged_attention(q, k_pages, v_pages, batch, Window(5), lists=lists, backend="cpu")


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("tiles", 0, 900, "a tile of sequence 0 must lie below"),
        ("bit_index", 0, 10**6, "has bit tile 1000000"),
        ("first_row", 4, 10**6, "first_row of sequence 4"),
        ("start", 1, 10**6, "must ascend"),
        ("order", 0, 7, "order of sequence 0"),
    ],
)
def test_debug_mode_follows_them(
    monkeypatch: pytest.MonkeyPatch, name: str, index: int, value: int, message: str
) -> None:
    monkeypatch.setattr(debug, "ENABLED", True)
    q, k_pages, v_pages, batch = batch_of()
    lists = lists_for(LISTED["strided"], q, k_pages, "cpu")
    paged_attention(q, k_pages, v_pages, batch, lists=lists, backend="cpu")
    wrong = getattr(lists, name).clone()
    wrong[index] = value
    with pytest.raises(ValueError, match=f"^lists: .*{message}"):
        paged_attention(q, k_pages, v_pages, batch, lists=replace(lists, **{name: wrong}), backend="cpu")
