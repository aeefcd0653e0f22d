"""Decode over chosen blocks: bounds, choice, attention and what is known of the rest."""

from __future__ import annotations

import math

import pytest
import torch
from longreach_kernels import PagedBatch, paged_attention, write_pages
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.mask import Full
from longreach_kernels.sparse import block_attention, keys_read, new_bounds, select_blocks, write_bounds
from longreach_kernels.sparse.decode.attend import products_on_cpu
from longreach_kernels.sparse.decode.choose import choose
from longreach_kernels.sparse.decode.score import scores
from torch import Tensor

from tests.kernels.accuracy import check, paged

LENGTHS = [300, 16, 0, 129, 47, 1]
HERE = ["cpu", "triton"]


def decodes(page_size: int = 32, head_dim: int = 16, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """q, pages, bounds of all of them, and a batch of decodes."""
    q, k_pages, v_pages, batch = paged([1] * len(LENGTHS), LENGTHS, page_size, 4, 2, head_dim, dtype, device)
    return q, k_pages, v_pages, bounds_of(k_pages, batch), batch


def bounds_of(k_pages: Tensor, batch: PagedBatch, backend: str = "auto") -> Tensor:
    page_size, bounds = k_pages.shape[1], new_bounds(k_pages)
    positions = [torch.arange(n, device=k_pages.device) for n in batch.context_lens.tolist()]
    slots = [batch.page_table[b].long()[p // page_size] * page_size + p % page_size for b, p in enumerate(positions)]
    write_bounds(k_pages, bounds, torch.cat(slots), backend=backend)
    return bounds


def keys_of(pages: Tensor, batch: PagedBatch, sequence: int) -> Tensor:
    length = int(batch.context_lens[sequence])
    return pages[batch.page_table[sequence, : -(-length // pages.shape[1])].long()].flatten(0, 1)[:length]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("backend", HERE)
def test_bounds_are_those_of_the_tokens_that_are_there(backend: str, dtype: torch.dtype) -> None:
    k_pages = torch.full((3, 32, 2, 24), 400.0).to(dtype)  # what an earlier owner left
    bounds = new_bounds(k_pages)
    k = torch.randn(45, 2, 24).to(dtype).float()
    for start, stop in ((0, 20), (20, 21), (21, 45)):
        slots = torch.cat([torch.arange(start, stop) + 32, torch.tensor([-1])])
        new = torch.cat([k[start:stop], k[:1]]).to(torch.float32)
        scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(2)} if dtype == torch.float8_e4m3fn else {}
        write_pages(new, new, k_pages, k_pages.clone(), slots, backend="cpu", **scales)
        write_bounds(k_pages, bounds, slots, backend=backend)
        for block in range(-(-stop // 16)):
            own = k[block * 16 : min(stop, block * 16 + 16)]
            page, place = divmod(block + 2, 2)
            assert torch.equal(bounds[page, place, :, 0].float(), own.amin(0))
            assert torch.equal(bounds[page, place, :, 1].float(), own.amax(0))
    assert not bounds[0].float().any(), "nothing was written there"


@pytest.mark.parametrize("head_dim", [16, 24])
def test_no_logit_is_above_its_bound(head_dim: int) -> None:
    q, k_pages, _, bounds, batch = decodes(head_dim=head_dim)
    expected = products_on_cpu(q, bounds, batch)
    for b, length in enumerate(LENGTHS):
        for head in range(4):
            logits = keys_of(k_pages, batch, b)[:, head // 2] @ q[b, head]
            for block, part in enumerate(logits.split(16) if length else ()):
                assert part.max() <= expected[b, head, block] + 1e-5
        assert (expected[b, :, -(-length // 16) :] == float("-inf")).all()
    one = keys_of(k_pages, batch, 5)[0]  # of one key the bound is its logit
    torch.testing.assert_close(expected[5, :, 0], (q[5] * one.repeat_interleave(2, 0)).sum(-1), atol=1e-5, rtol=1e-5)
    found, best = scores(q, bounds, batch, 1.0, None, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(best, found.unflatten(1, (2, 2)).amax(2))
    scale = torch.tensor([0.5, 2.0])
    capped, best = scores(q, bounds, batch, -3.0, 4.0, scale)
    raw = expected * -3.0 * scale.repeat_interleave(2)[:, None]
    expected = torch.where(expected == float("-inf"), expected, 4.0 * torch.tanh(raw / 4.0))
    torch.testing.assert_close(capped, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(best, capped.unflatten(1, (2, 2)).amax(2))


@pytest.mark.parametrize("backend", HERE)
def test_the_first_the_last_and_the_greatest_are_chosen(backend: str) -> None:
    q, _, _, bounds, batch = decodes()
    choice = select_blocks(q, bounds, batch, budget=80, backend=backend)
    assert choice.lengths.tolist() == [76, 16, 0, 65, 47, 1]
    best = products_on_cpu(q, bounds, batch).unflatten(1, (2, 2)).amax(2)
    for b, length in enumerate(LENGTHS):
        count = -(-length // 16)
        for head in range(2):
            chosen = choice.blocks[b, head, : min(count, 5)].tolist()
            assert chosen == sorted(set(chosen))
            middle = best[b, head, 1 : count - 1].argsort(descending=True)[: max(0, 3)] + 1
            assert set(chosen) == ({0, count - 1} | set(middle.tolist()) if count else set())


@pytest.mark.parametrize("room", [2, 100, 1023, 2500])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (16, 1)], ids=str)
def test_one_launch_chooses_what_sorting_does(heads: tuple[int, int], room: int) -> None:
    """Blocks of several passes, equal bounds, of which the first are taken, and negative ones."""
    torch.manual_seed(room)
    lengths = torch.tensor([40_000, 5, 0, 16 * 1024, 33_000], dtype=torch.int32)
    limit = 2500
    logits = torch.randn(len(lengths), heads[0], limit) * 50
    logits[1:4] = logits[1:4].round(decimals=-1)  # many are equal
    number, count = torch.arange(limit), (lengths[:, None] + 15) // 16
    logits[(number >= count)[:, None].expand_as(logits)] = float("-inf")
    table = torch.stack([torch.randperm(700) for _ in lengths]).int()
    batch = PagedBatch(torch.arange(6, dtype=torch.int32), lengths, table, max_seqlen_q=1, max_context_len=40_000)
    best_of_head = logits.unflatten(1, (heads[1], -1)).amax(2)
    blocks, rows, tokens, skipped = choose(logits, best_of_head, batch, room, blocks_of_page=4)
    for b, length in enumerate(lengths.tolist()):
        n = -(-length // 16)
        assert tokens[b] == keys_read(length, room * 16) if length else tokens[b] == 0
        for head in range(heads[1]):
            own = slice(head * heads[0] // heads[1], (head + 1) * heads[0] // heads[1])
            best = logits[b, own, :n].amax(0)
            if n:
                best[[0, -1]] = float("inf")
            expected = best.argsort(descending=True, stable=True)[:room].sort().values
            assert blocks[b, head, : len(expected)].tolist() == expected.tolist()
            assert (blocks[b, head, len(expected) :] == limit).all()
            assert (rows[b, head, : len(expected)] == table[b][expected // 4] * 4 + expected % 4).all()
            left = torch.ones(n, dtype=torch.bool).index_fill(0, expected, False)
            weight = (logits[b, own, :n][:, left].double() + math.log(16)).logsumexp(-1)
            torch.testing.assert_close(skipped[b, own].double(), weight, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sink_logits": torch.linspace(-1.0, 2.0, 4)}], ids=str)
@pytest.mark.parametrize("backend", HERE)
def test_attention_to_what_was_chosen(backend: str, options: dict, page_size: int) -> None:
    q, k_pages, v_pages, bounds, batch = decodes(page_size)
    softcap = options.get("softcap")
    choice = select_blocks(q, bounds, batch, budget=96, softcap=softcap, backend=backend)
    out, lse = block_attention(q, k_pages, v_pages, batch, choice, backend=backend, **options)
    sinks = options.get("sink_logits")
    for b, length in enumerate(LENGTHS):
        if length == 0:
            assert not out[b].any()
            continue
        for head in range(2):
            own = slice(2 * head, 2 * head + 2)
            count = -(-int(choice.lengths[b]) // 16)
            blocks = choice.blocks[b, head, :count].long()
            places = (blocks[:, None] * 16 + torch.arange(16)).flatten()[: int(choice.lengths[b])]
            k, v = (keys_of(x, batch, b)[places, head][None, None] for x in (k_pages, v_pages))
            more = options | ({"sink_logits": sinks[own]} if sinks is not None else {})
            check(
                out[b, own][None, :, None], lse[b, own][None, :, None], q[b, own][None, :, None], k, v, Full(), **more
            )


@pytest.mark.parametrize("backend", HERE)
def test_a_budget_for_everything_is_dense_attention(backend: str) -> None:
    q, k_pages, v_pages, bounds, batch = decodes()
    choice = select_blocks(q, bounds, batch, budget=10_000, backend=backend)
    out, lse = block_attention(q, k_pages, v_pages, batch, choice, backend=backend)
    dense, dense_lse = paged_attention(q, k_pages, v_pages, batch, backend=backend, return_lse=True)
    torch.testing.assert_close(out, dense, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, dense_lse, atol=1e-5, rtol=1e-5)
    assert not choice.missed(lse)[batch.context_lens > 0].any(), "nothing is skipped, and nothing missed"


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("strength", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("backend", HERE)
def test_no_more_is_missed_than_the_certificate_says(backend: str, strength: float, softcap: float | None) -> None:
    q, k_pages, v_pages, bounds, batch = decodes()
    options = {"scale": strength * 0.25, "softcap": softcap, "backend": backend}
    choice = select_blocks(q, bounds, batch, budget=64, **options)
    _, lse = block_attention(q, k_pages, v_pages, batch, choice, **options)
    bound = choice.missed(lse).double()
    _, dense = reference.paged_attention(
        q,
        k_pages,
        v_pages,
        batch,
        AttentionCall(Full(), scale=strength * 0.25, softcap=softcap),
        compute_dtype=torch.float64,
    )
    real = batch.context_lens > 0
    missed = 1 - torch.exp(lse.double() - dense)[real]
    assert (missed <= bound[real] + 1e-6).all()
    assert missed.max() > 0.01, "something is missed"
    assert bound[0].max() < 1.0


def test_8_bit_pages() -> None:
    q, k_pages, v_pages, _, batch = decodes()
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([1.5, 0.7])}
    k8, v8 = (
        (x / s[:, None]).to(torch.float8_e4m3fn) for x, s in zip((k_pages, v_pages), scales.values(), strict=True)
    )
    exact = [x.float() * s[:, None] for x, s in zip((k8, v8), scales.values(), strict=True)]
    wide = bounds_of(exact[0], batch)
    expected = block_attention(q, *exact, batch, select_blocks(q, wide, batch, budget=64), backend="cpu")
    for backend in HERE:
        bounds = bounds_of(k8, batch, backend)
        choice = select_blocks(q, bounds, batch, budget=64, k_scale=scales["k_scale"], backend=backend)
        got = block_attention(q, k8, v8, batch, choice, backend=backend, **scales)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [32, 47, 64, 400])
def test_how_many_keys_are_read_is_known_beforehand(budget: int) -> None:
    q, _, _, bounds, batch = decodes()
    choice = select_blocks(q, bounds, batch, budget=budget)
    assert choice.lengths.tolist() == [keys_read(length, budget) for length in batch.context_lens.tolist()]
    assert choice.lengths.max() <= budget


def test_bad_arguments_are_named() -> None:
    q, k_pages, v_pages, bounds, batch = decodes()
    choice = select_blocks(q, bounds, batch, budget=64)
    two = PagedBatch(torch.tensor([0, 2], dtype=torch.int32), batch.context_lens[:1], batch.page_table[:1], 2, 300)
    for name, call in {
        "batch": lambda: select_blocks(q[:2], bounds, two, budget=64),
        "bounds": lambda: select_blocks(q, bounds[..., :8], batch, budget=64),
        "budget": lambda: select_blocks(q, bounds, batch, budget=16),
        "k_scale": lambda: select_blocks(q, bounds, batch, budget=64, k_scale=torch.ones(2)),
        "softcap": lambda: select_blocks(q, bounds, batch, budget=64, softcap=0.0),
        "choice": lambda: block_attention(q[:2], k_pages, v_pages, batch, choice),
        "k_pages": lambda: block_attention(
            q, k_pages[:, :24].contiguous(), v_pages[:, :24].contiguous(), batch, choice
        ),
        "slots": lambda: write_bounds(k_pages, bounds, torch.zeros(3)),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            call()
    with pytest.raises(ValueError, match=r"^k_pages: .*multiple of 16"):
        new_bounds(k_pages[:, :24])
    with pytest.raises(ValueError, match=r"^bounds: "):
        write_bounds(k_pages, bounds[:1], torch.zeros(3, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_without_waiting_for_it(dtype: torch.dtype) -> None:
    lengths = [5000, 300, 0, 1, 2049]
    q, k_pages, v_pages, batch = paged([1] * 5, lengths, 128, 32, 8, 128, dtype, "cuda")
    bounds = bounds_of(k_pages, batch)
    on_host = PagedBatch(*(x.cpu() for x in (batch.cu_seqlens_q, batch.context_lens, batch.page_table)), 1, 5000)
    assert torch.equal(bounds.cpu(), bounds_of(k_pages.cpu(), on_host))

    def run():
        choice = select_blocks(q, bounds, batch, budget=512)
        return choice, *block_attention(q, k_pages, v_pages, batch, choice)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        choice, out, lse = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = select_blocks(q.cpu(), bounds.cpu(), on_host, budget=512)
    assert torch.equal(choice.lengths.cpu(), want.lengths)
    torch.testing.assert_close(choice.skipped.cpu(), want.skipped, atol=1e-2, rtol=1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, captured, _ = run()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, out)
    args = (q.cpu().float(), k_pages.cpu().float(), v_pages.cpu().float(), on_host)
    moved = type(choice)(*(x.cpu() for x in (choice.blocks, choice.lengths, choice.skipped, choice.rows)))
    expected, expected_lse = block_attention(*args, moved)
    torch.testing.assert_close(out.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=1e-2, rtol=1e-3)
