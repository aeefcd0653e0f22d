"""A floor under the kept mass: drawn queries keep it, what is told is what was read, and everything else stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longreach_kernels import Causal, PagedBatch, paged_attention
from longreach_kernels.masks.listed_mask import listed_masks
from longreach_kernels.sparse import Antidiagonal, Density, MassFloor, Recall, choose_above, choose_tiles, plan_tiles
from longreach_kernels.sparse.select import select_tiles
from longreach_kernels.sparse.select.mass_floor import drawn_count, drawn_rows
from longreach_kernels.sparse.select.reference import Logits
from longreach_kernels.sparse.select.reference import row_masses as row_masses_on_cpu
from torch import Tensor

from tests.kernels.accuracy import paged

TILES = ([3, 2], [11, 7])  # queries and keys of two prompts in one step, both some chunks in and neither at its end
ENDS = torch.tensor([8000, 9000], dtype=torch.int32)
SIZES = {"cpu": 128, "triton": 32}  # of a backend's tiles
OPTIONS = {"local": 32, "tail": 32, "dense_below": 0}


def lengths_of(size: int) -> tuple[list[int], list[int]]:
    queries, keys = ([size * count for count in counts] for counts in TILES)
    return queries, keys


def batch_of(size: int) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    torch.manual_seed(0)
    q, k_pages, v_pages, batch = paged(*lengths_of(size), size, 4, 2, 16, num_decodes=0, device="cpu")
    return q * 3, k_pages, v_pages, batch


def exact_shares(q: Tensor, k_pages: Tensor, batch: PagedBatch, lists) -> list[Tensor]:
    """(Hkv, queries) fp64 of each sequence: what each query keeps in the worst head of its KV head."""
    found = []
    queries_and_keys = batch.host_lengths
    masks = listed_masks(lists, *map(list, queries_and_keys))
    for b, (queries, keys) in enumerate(zip(*queries_and_keys, strict=True)):
        start = int(batch.cu_seqlens_q[b])
        pages = batch.page_table[b, : -(-keys // k_pages.shape[1])].long()
        k = k_pages[pages].flatten(0, 1)[:keys].double().transpose(0, 1).repeat_interleave(2, 0)
        own = q[start : start + queries].double().transpose(0, 1)
        positions = torch.arange(keys - queries, keys), torch.arange(keys)
        dense = (own @ k.mT * q.shape[-1] ** -0.5).masked_fill(~Causal().allowed(*positions), float("-inf")).softmax(-1)
        allowed = masks[b].allowed(*positions)
        allowed = allowed.repeat_interleave(4 // len(allowed), 0)
        found.append((dense * allowed).sum(-1).unflatten(0, (2, 2)).amin(1))
    return found


@pytest.mark.parametrize("backend", SIZES)
def test_drawn_queries_keep_the_floor_and_counts_tell_it(backend: str) -> None:
    q, k_pages, _, batch = batch_of(SIZES[backend])
    plan = plan_tiles(q, k_pages, batch, prompt_lens=ENDS, **OPTIONS, backend=backend)
    queries, keys = batch.host_lengths
    given: dict[str, Any] = {"target": Density(0.1), "estimator": Antidiagonal(16), "backend": backend}
    chosen = choose_tiles(q, k_pages, plan, **given)
    tiles = plan.frame.tiles
    tested = (plan.visible & ~plan.forced).any(-1)
    row, position, seq = drawn_rows(tiles, batch, 3, tested)
    assert len(row) == len(tiles.seq) * drawn_count(tiles.tile_q)
    assert min(float(x.min()) for x in exact_shares(q, k_pages, batch, chosen)) < 0.9
    for floor in (0.9, 0.9999, 1e-6):
        lists, found = choose_above(q, k_pages, plan, MassFloor(floor, layer=3), **given)
        kept = exact_shares(q, k_pages, batch, lists)
        least = torch.ones(2)
        for r, at, b in zip(row.tolist(), position.tolist(), seq.tolist(), strict=True):
            if r < 0:
                continue
            own = kept[b][:, at - (keys[b] - queries[b])]
            assert (own > floor - 1e-4).all(), (floor, b, at)
            least[b] = min(least[b], float(own.min()))
        rows, widened, whole, decided, mass = found.counts.unbind(1)
        assert rows.tolist() == (2 * tested).tolist()
        told = [float(found.least[tiles.seq == b, 0].min()) for b in (0, 1)]
        assert told == pytest.approx(least.tolist(), abs=1e-4)
        assert (decided <= widened + whole).all()
        if floor < 0.1:
            assert not (widened + whole + decided).any()
            assert torch.equal(lists.start, chosen.start)
        else:
            assert (widened + whole).any()
            assert int(lists.start[-1]) > int(chosen.start[-1])
        if floor > 0.99:
            assert torch.equal(whole + widened, rows)
            assert mass.tolist() == pytest.approx(rows.tolist(), abs=1e-3)


def test_what_is_read_whole_is_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is tried before taken away, what falls below the floor reads every tile that it sees."""
    monkeypatch.setattr(select_tiles, "WIDER", ())
    q, k_pages, v_pages, batch = batch_of(128)
    plan = plan_tiles(q, k_pages, batch, prompt_lens=ENDS, **OPTIONS, backend="cpu")
    lists, found = choose_above(q, k_pages, plan, MassFloor(0.999), target=Density(0.1), backend="cpu")
    assert torch.equal(found.counts[:, 2], found.counts[:, 0])
    assert int(lists.start[-1]) == 2 * int(plan.visible.sum())
    assert (found.least[:, 0] == 1).all()
    dense = paged_attention(q, k_pages, v_pages, batch, backend="cpu")
    torch.testing.assert_close(paged_attention(q, k_pages, v_pages, batch, lists=lists, backend="cpu"), dense)


def test_what_is_found_does_not_depend_on_how_a_prompt_is_cut() -> None:
    q, k_pages, _, batch = batch_of(128)
    given: dict[str, Any] = {"target": Recall(0.5), "estimator": Antidiagonal(16), "backend": "cpu"}
    floor = MassFloor(0.9, layer=1)
    plan = plan_tiles(q, k_pages, batch, prompt_lens=ENDS, **OPTIONS, backend="cpu")
    whole, counts = choose_above(q, k_pages, plan, floor, **given)
    found = []
    for start, end in ((0, 256), (256, 384)):
        part = PagedBatch(
            torch.tensor([0, end - start], dtype=torch.int32),
            batch.context_lens[:1] - 384 + end,
            batch.page_table[:1],
            max_seqlen_q=end - start,
            max_context_len=1408 - 384 + end,
        )
        cut = plan_tiles(q[start:end], k_pages, part, prompt_lens=ENDS[:1], **OPTIONS, backend="cpu")
        found.append(choose_above(q[start:end], k_pages, cut, floor, **given))
    pieces = torch.cat([found[0][1].counts[:2], found[1][1].counts[:1]])
    assert pieces[:, 1:3].any()
    torch.testing.assert_close(pieces, counts.counts[:3])
    assert sum(int(lists.start[-1]) for lists, _ in found) == int(whole.start[whole.first_row[1]])


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_kernel_and_specification_agree(softcap: float | None) -> None:
    from longreach_kernels.sparse.select.row_masses import row_masses

    q, k_pages, _, batch = batch_of(32)
    plan = plan_tiles(q, k_pages, batch, prompt_lens=ENDS, **OPTIONS, backend="triton")
    tiles = plan.frame.tiles
    rows = drawn_rows(tiles, batch, 0, (plan.visible & ~plan.forced).any(-1))
    k_scale = torch.tensor([0.5, 2.0]) if softcap is not None else None
    logits = Logits(0.3, softcap, k_scale)
    expected = row_masses_on_cpu(q, k_pages, batch, tiles, rows, logits)
    torch.testing.assert_close(row_masses(q, k_pages, batch, tiles, rows, logits), expected, rtol=1e-4, atol=1e-4)
    assert int((expected > float("-inf")).sum()) > 0


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5])
def test_floors_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="floor"):
        MassFloor(share)
