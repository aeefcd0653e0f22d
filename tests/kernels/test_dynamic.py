"""What is chosen by estimates of where attention lies, and the lists that are made of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from longreach_kernels import Causal, PagedBatch, Window, debug, list_tiles, paged_attention
from longreach_kernels.masks.listed_mask import listed_masks
from longreach_kernels.sparse import (
    Antidiagonal,
    Density,
    Moments,
    Pooled,
    Recall,
    Speedup,
    Threshold,
    choose_tiles,
    plan_tiles,
    select_tiles,
)
from longreach_kernels.sparse.select.lists import edge_frame, lists_of_choice
from longreach_kernels.sparse.select.query_tiles import query_tiles
from longreach_kernels.sparse.select.targets import PARTS, choose, density_of
from torch import Tensor

from tests.kernels.accuracy import check, check_paged, paged
from tests.kernels.compiled import compiled
from tests.pairwise import covering, daily, thinned

LENGTHS = ([1, 100, 64, 150], [90, 180, 64, 230])  # a decode, chunks at odd places and at a tile's edge
BACKENDS = ["cpu", "triton"]


def batch_of(head_dim: int = 16, page_size: int = 16, device: torch.device | str = "cpu", **options):
    return paged(*LENGTHS, page_size, 4, 2, head_dim, num_decodes=1, device=device, **options)


def keys_of(k_pages: Tensor, batch: PagedBatch, sequence: int) -> Tensor:
    length = int(batch.context_lens[sequence])
    pages = batch.page_table[sequence, : -(-length // k_pages.shape[1])].long()
    return k_pages[pages].flatten(0, 1)[:length]


@pytest.mark.parametrize("window", [None, 1, 20, 50, 130])
@pytest.mark.parametrize("sizes", [(32, 32), (64, 32), (16, 64)])
def test_lists_mean_the_choice_and_the_edges(sizes: tuple[int, int], window: int | None) -> None:
    q, _, _, batch = batch_of()
    tiles = query_tiles(batch, len(q), *sizes, window)
    keep = torch.rand(2, *tiles.visible().shape) < 0.6
    lists = lists_of_choice(keep & tiles.visible(), edge_frame(tiles, 2), kernels=False)
    debug.check_lists(lists, batch)
    mask = Causal() if window is None else Window(window)
    for b, (meant, queries, keys) in enumerate(zip(listed_masks(lists, *LENGTHS), *LENGTHS, strict=True)):
        slot = int(((tiles.seq == b) & (tiles.tile == 0)).nonzero())
        positions = torch.arange(keys - queries, keys), torch.arange(keys)
        own = keep[:, slot : slot + -(-queries // sizes[0])]
        chosen = own.repeat_interleave(sizes[0], 1).repeat_interleave(sizes[1], 2)[:, :queries, :keys]
        assert torch.equal(meant.allowed(*positions), chosen & mask.allowed(*positions))
    lengths = lists.start.diff()
    for b, queries in enumerate(LENGTHS[0]):
        count = -(-queries // sizes[0])
        for head in range(2):
            first = int(lists.first_row[b]) + head * count
            walked = lengths[first : first + count][lists.order[first : first + count].long()]
            assert (walked.diff() <= 0).all(), "longest first"


@pytest.mark.parametrize(
    ("window", "backend", "target"), covering([None, 50], BACKENDS, [Recall(1.0), Density(1.0)]), ids=str
)
def test_all_of_it_is_dense_attention(window: int | None, backend: str, target) -> None:
    q, k_pages, v_pages, batch = batch_of()
    lists = select_tiles(q, k_pages, batch, target=target, window=window, dense_below=0, tail=0, backend=backend)
    out, lse = paged_attention(q, k_pages, v_pages, batch, lists=lists, backend=backend, return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, Causal() if window is None else Window(window))


def kept(lists, batch: PagedBatch, sequence: int) -> Tensor:
    """(H, query tiles, key tiles) bool of one sequence."""
    return listed_masks(lists, *batch.host_lengths)[sequence].state >= -1


def long_batch(length: int = 1600, chunk: int | None = None, device: str = "cpu"):
    """One prompt whose queries of tile 9 look for one key of tile 2 (tiles of 128); all else is noise."""
    q, k_pages, v_pages, batch = paged([length], [length], 16, 4, 2, 16, device=device)
    q, k_pages = q * 0.2, k_pages * 0.2
    direction = torch.nn.functional.normalize(torch.randn(16), dim=0)
    q[9 * 128 : 10 * 128] += 6 * direction
    rows = batch.page_table[0].repeat_interleave(16) * 16 + torch.arange(16).repeat(batch.page_table.shape[1])
    at = rows[2 * 128 + 37 : 2 * 128 + 53].long()  # a stretch, as words of a sentence are
    k_pages.view(-1, 2, 16)[at] += 6 * direction
    return q, k_pages, v_pages, batch


@pytest.mark.parametrize("estimator", [Antidiagonal(16), Antidiagonal(8), Moments(), Pooled()], ids=repr)
@pytest.mark.parametrize("target", [Recall(0.8), Density(0.5), Threshold(0.5), Speedup(2.0)], ids=repr)
def test_a_place_that_matters_is_found(target, estimator) -> None:
    q, k_pages, _, batch = long_batch()
    none = {"local": 0, "tail": 0, "dense_below": 0}
    lists = select_tiles(q, k_pages, batch, target=target, estimator=estimator, **none)
    found = kept(lists, batch, 0)
    assert found[:, 9, 2].all()
    assert found[:, :, 0].all(), "the first tile is always kept"
    assert found.diagonal(dim1=1, dim2=2).all(), "the diagonal is always kept"
    assert found[:, 9].sum() < 20, "of 20 tiles that it may see"


def test_one_key_that_one_query_looks_for_is_found() -> None:
    options = {"target": Density(0.4), "local": 0, "tail": 0, "dense_below": 0}
    found: Counter[str] = Counter()
    for seed in range(4):
        torch.manual_seed(seed)
        q, k_pages, _, batch = long_batch()
        direction = torch.nn.functional.normalize(torch.randn(16), dim=0)
        q[9 * 128 + 77] = 6 * direction
        page, place = divmod(5 * 128 + 40, 16)
        k_pages[batch.page_table[0, page], place] = 8 * direction
        for estimator in (Moments(), Pooled(), Antidiagonal(16)):
            lists = select_tiles(q, k_pages, batch, estimator=estimator, **options)
            found[type(estimator).__name__] += bool(kept(lists, batch, 0)[:, 9, 5].all())
    assert found["Moments"] == 4, found
    assert found["Antidiagonal"] < 4, "as hard for one as it was meant to be"


def test_what_is_always_kept() -> None:
    q, k_pages, _, batch = paged([1, 1100], [1200, 1600], 16, 4, 2, 16, num_decodes=1)
    lens = torch.tensor([1100, 2000], dtype=torch.int32)
    options = {"target": Density(1e-6), "prompt_lens": lens}
    alone = kept(select_tiles(q, k_pages, batch, local=0, tail=0, dense_below=0, **options), batch, 1)
    assert alone.sum(-1).eq(3).all()  # the first tile, and two since the chunk begins amid one
    near = kept(select_tiles(q, k_pages, batch, local=256, tail=0, dense_below=0, **options), batch, 1)
    assert near.sum(-1)[:, 4].eq(5).all()
    early = kept(select_tiles(q, k_pages, batch, local=0, tail=0, dense_below=700, **options), batch, 1)
    assert early.sum(-1)[0, :3].tolist() == [5, 6, 3]
    tail = select_tiles(q, k_pages, batch, local=0, tail=500, dense_below=0, **options)
    assert kept(tail, batch, 0).all(), "what answers a prompt sees all of it"
    assert kept(tail, batch, 1).sum(-1)[0].tolist() == [3, 3, 3, 3, 3, 3, 3, 12, 13]


CHUNKED = [
    ("cpu", target, x)
    for target in (Recall(0.6), Density(0.5), Threshold(0.7))
    for x in (Antidiagonal(4), Moments(16), Pooled())
]
CHUNKED += daily(
    [
        ("triton", Recall(0.6), Antidiagonal(4)),
        ("triton", Density(0.5), Pooled()),
        ("triton", Recall(0.6), Moments(16)),
    ],
    1,
)


@pytest.mark.parametrize(("backend", "target", "estimator"), CHUNKED, ids=str)
def test_chunks_and_neighbours_change_no_bit(backend: str, target, estimator) -> None:
    length, step = (1500, 512) if backend == "cpu" else (230, 96)
    q, k_pages, v_pages, batch = paged([70, length], [200, length], 16, 4, 2, 16)
    options = {"target": target, "estimator": estimator, "local": 64, "tail": 100, "dense_below": 64}
    options["backend"] = backend
    lens = torch.tensor([9999, length], dtype=torch.int32)
    lists = select_tiles(q, k_pages, batch, prompt_lens=lens, **options)
    whole = paged_attention(q, k_pages, v_pages, batch, lists=lists, backend=backend)[70:]
    tile = list_tiles(q, k_pages, backend=backend)[0]
    assert step % tile == 0
    assert not kept(lists, batch, 1).all(), "something is left out"
    for start in range(0, length, step):
        stop = min(start + step, length)
        part = q[70 + start : 70 + stop]
        lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, stop - start], [stop])]
        alone = PagedBatch(*lengths, batch.page_table[1:].contiguous(), stop - start, stop)
        own = select_tiles(part, k_pages, alone, prompt_lens=lens[1:], **options)
        out = paged_attention(part, k_pages, v_pages, alone, lists=own, backend=backend)
        assert torch.equal(out, whole[start:stop])


def test_recall_keeps_the_heaviest_until_their_share_is_reached() -> None:
    mass = torch.tensor([[[0.1, 0.4, 0.05, 0.25, 0.2, 0.0]]])
    mass = (mass * PARTS).int()[:, :, None]
    visible = torch.tensor([[True] * 5 + [False]])
    none = torch.zeros_like(visible)
    pick = lambda share, forced=none: choose(mass, visible, forced, Recall(share))[0, 0].nonzero().flatten().tolist()  # noqa: E731
    assert pick(0.3) == [1]
    assert pick(0.6) == [1, 3]
    assert pick(0.7) == [1, 3, 4]
    assert pick(1.0) == [0, 1, 2, 3, 4]
    forced = none.clone()
    forced[0, [2, 5]] = True
    assert pick(0.3, forced) == [1, 2]
    assert pick(0.05, forced) == [2]


def test_a_strip_of_a_tile_finds_its_own_share() -> None:
    """Alone; a budget goes by all of them together."""
    mass = (torch.tensor([[[[0.9, 0.1, 0.0, 0.0], [0.0, 0.1, 0.2, 0.7], [0.0, 0.0, 0.0, 0.0]]]]) * PARTS).int()
    visible, none = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    kept = lambda target: choose(mass, visible, none, target)[0, 0].nonzero().flatten().tolist()  # noqa: E731
    assert kept(Recall(0.6)) == [0, 3]
    assert kept(Recall(0.85)) == [0, 2, 3]
    assert kept(Density(0.25)) == [0]
    assert kept(Density(0.5)) == [0, 3]
    assert kept(Threshold(0.5)) == [0, 3]


def test_density_is_a_budget_that_heads_share() -> None:
    mass = (torch.tensor([[[0.9, 0.05, 0.05, 0.0]], [[0.3, 0.3, 0.2, 0.2]]]) * PARTS).int()[:, :, None]
    visible, none = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    assert choose(mass, visible, none, Density(0.5)).sum(-1).flatten().tolist() == [1, 3]
    assert choose(mass, visible, none, Density(0.4)).sum() == 4  # 3.2, rounded up
    assert choose(mass, visible, visible, Density(0.4)).all()


def test_threshold_compares_with_the_heaviest() -> None:
    mass = (torch.tensor([[[0.5, 0.06, 0.04, 0.4]], [[0.25, 0.25, 0.25, 0.25]]]) * PARTS).int()[:, :, None]
    visible, none = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    assert choose(mass, visible, none, Threshold(0.1)).sum(-1).flatten().tolist() == [3, 4]


def test_speedup_pays_for_the_estimate() -> None:
    assert density_of(Speedup(4.0), 0.05).share == pytest.approx(0.2)
    assert density_of(Speedup(1.0), 0.0).share == 1.0
    with pytest.raises(ValueError, match=r"^target: .*less than 20\.0"):
        density_of(Speedup(20.0), 0.05)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"target": 0.9}, "target"),
        ({"estimator": "pooled"}, "estimator"),
        ({"window": 0}, "window"),
        ({"local": -1}, "local"),
        ({"tail": -1}, "tail"),
        ({"dense_below": -1}, "dense_below"),
        ({"scale": 0.0}, "scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"k_scale": torch.ones(2)}, "k_scale"),
        ({"prompt_lens": torch.ones(4)}, "prompt_lens"),
        ({"prompt_lens": torch.ones(3, dtype=torch.int32)}, "prompt_lens"),
    ],
)
def test_bad_arguments_are_named(options: dict, named: str) -> None:
    q, k_pages, _, batch = batch_of()
    with pytest.raises(ValueError, match=f"^{named}: "):
        select_tiles(q, k_pages, batch, **{"target": Recall(0.9)} | options)
    for make in (lambda: Recall(0.0), lambda: Density(1.5), lambda: Threshold(float("nan"))):
        with pytest.raises(ValueError, match=r"^share: "):
            make()
    with pytest.raises(ValueError, match=r"^factor: "):
        Speedup(0.5)
    with pytest.raises(ValueError, match=r"^stride: "):
        Antidiagonal(5)
    with pytest.raises(ValueError, match=r"^block: "):
        Moments(48)
    with pytest.raises(ValueError, match=r"^q: "):
        select_tiles(q[0], k_pages, batch, target=Recall(0.9))
    with pytest.raises(ValueError, match=r"^k_pages: "):
        select_tiles(q, k_pages[0], batch, target=Recall(0.9))


def test_one_plan_serves_many_layers() -> None:
    q, k_pages, _, batch = paged([600, 300], [1400, 900], 16, 4, 2, 16)
    plan = plan_tiles(q, k_pages, batch, local=0, tail=0, dense_below=0)
    for queries, target in ((q, Recall(0.5)), (q.flip(0), Recall(0.5)), (q, Density(0.4))):
        alone = select_tiles(queries, k_pages, batch, target=target, local=0, tail=0, dense_below=0)
        lists = choose_tiles(queries, k_pages, plan, target=target)
        assert torch.equal(lists.start, alone.start)
        assert torch.equal(lists.tiles, alone.tiles)
        assert torch.equal(lists.order, alone.order)
        assert not torch.equal(lists.tiles, choose_tiles(queries, k_pages, plan, target=Recall(1.0)).tiles)


def test_a_plan_of_another_step_is_refused() -> None:
    q, k_pages, _, batch = batch_of()
    plan = plan_tiles(q, k_pages, batch)
    for queries, pages in ((torch.cat([q, q, q]), k_pages), (q, k_pages[:, :, :1])):
        with pytest.raises(ValueError, match=r"^plan: "):
            choose_tiles(queries, pages, plan, target=Recall(0.9))


# As in `compile_dynamic`, which cannot be imported here: Triton's interpreter has been chosen.
FOLDED = [f"folded {stride} {keys}" for stride in (8, 16) for keys in ("bf16", "fp8 softcap")]
SECOND_ORDER = ["second order 32", "second order 64", "second order fp8 softcap"]
ROWS = ["rows bf16", "rows fp8 softcap"]
KERNELS = [*FOLDED, "join 8", "join 16", "pooled", *SECOND_ORDER, *ROWS]
KERNELS += [f"{name} moments" for name in ("pooled", *SECOND_ORDER)]
KERNELS += [f"{name} {tiles}" for name in ("recall", "count", "entries") for tiles in (256, 8192)]
KERNELS += [f"{name} {keys}" for name in ("bounds", "scores") for keys in ("*bf16", "*fp8e4nv")] + ["choice", "weights"]
# Every kernel and every head dim once; others each day; LONGREACH_TEST_FULL=1 for all.
COMPILED = set(thinned([64, 128, 256], KERNELS, count=3, strength=1))
# Those with the fewest registers or the least memory to spare.
COMPILED |= {(128, name) for name in SECOND_ORDER} | {(256, name) for name in ("pooled", *FOLDED, *SECOND_ORDER)}


def test_the_kernels_compile_for_sm90() -> None:
    names = sorted(f"{head_dim}:{name}" for head_dim, name in COMPILED)
    made = compiled("tests.kernels.compile_dynamic", *names)
    assert sorted(made) == names
    for name, facts in made.items():
        head_dim = int(name.partition(":")[0])
        assert facts["shared_bytes"] <= 227 * 1024, (name, facts)
        assert facts["spills"] == 0, (name, facts)
        multiplies = (
            any(kind in name for kind in ("folded", "pooled", "second order", "rows")) and "moments" not in name
        )
        assert (facts["wgmma"] > 0) == multiplies, (name, facts)
        if "second order" in name and multiplies and head_dim <= 128:
            assert facts["registers"] <= 128, "two programs share the 65,536 of a processor"
            assert facts["shared_bytes"] <= 113 * 1024, "and its memory, of which each needs 1 KB more"


@pytest.mark.gpu
class TestOnGpu:
    LENGTHS = ([1, 700, 1500, 256], [900, 2000, 1500, 3000])

    def inputs(self, head_dim: int = 128, page_size: int = 128):
        return paged(*self.LENGTHS, page_size, 8, 2, head_dim, torch.bfloat16, "cuda", num_decodes=1)

    @pytest.mark.parametrize(
        ("backend", "head_dim", "estimator", "window"),
        thinned(
            ["triton", "auto"],
            [64, 128, 256],
            [Antidiagonal(8), Antidiagonal(16), Moments(), Pooled()],
            [None, 600],
            count=6,
        ),
        ids=str,
    )
    def test_attention_over_what_was_chosen(self, backend: str, head_dim: int, estimator, window: int | None) -> None:
        q, k_pages, v_pages, batch = self.inputs(head_dim)
        options = {"target": Recall(0.6), "estimator": estimator, "window": window}
        lists = select_tiles(q * 3, k_pages, batch, dense_below=256, tail=128, local=128, backend=backend, **options)
        debug.check_lists(lists, batch)
        visible = query_tiles(batch, len(q), lists.tile_q, lists.tile_k, window).visible().sum() * 2
        assert 0.1 * visible < lists.start[-1] < 0.95 * visible
        out, lse = paged_attention(q, k_pages, v_pages, batch, lists=lists, backend=backend, return_lse=True)
        starts = batch.cu_seqlens_q.tolist()
        for b, meant in enumerate(listed_masks(lists, *self.LENGTHS)):
            rows = slice(starts[b], starts[b + 1])
            k, v = (keys_of(x, batch, b).cpu().transpose(0, 1)[None] for x in (k_pages, v_pages))
            own = (out[rows].cpu().transpose(0, 1)[None], lse[rows].cpu().T[None])
            check(*own, q[rows].cpu().transpose(0, 1)[None], k, v, meant)

    @pytest.mark.parametrize(
        ("backend", "estimator", "target"),
        covering(
            ["triton", "auto"],
            [Antidiagonal(16), Moments(), Pooled()],
            [Recall(0.6), Density(0.4), Threshold(0.3)],
        ),
        ids=str,
    )
    def test_nothing_waits_for_the_device(self, backend: str, estimator, target) -> None:
        q, k_pages, v_pages, batch = self.inputs()
        options = {"target": target, "estimator": estimator, "dense_below": 256, "tail": 128, "backend": backend}

        def run() -> Tensor:
            lists = select_tiles(q, k_pages, batch, window=1000, **options)
            return paged_attention(q, k_pages, v_pages, batch, lists=lists, backend=backend)

        expected = run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out, expected)

    @pytest.mark.parametrize("target", [Recall(0.6), Density(0.4)], ids=repr)
    @pytest.mark.parametrize("estimator", [Antidiagonal(16), Moments(), Pooled()], ids=repr)
    def test_chunks_change_no_bit(self, estimator, target) -> None:
        q, k_pages, v_pages, batch = paged([6000], [6000], 128, 8, 2, 128, torch.bfloat16, "cuda")
        lens = batch.context_lens
        options = {"target": target, "estimator": estimator, "dense_below": 256, "tail": 128, "local": 128}
        lists = select_tiles(q, k_pages, batch, prompt_lens=lens, **options)
        whole = paged_attention(q, k_pages, v_pages, batch, lists=lists)
        for start, stop in ((0, 2048), (2048, 2560), (2560, 6000)):
            starts = torch.tensor([0, stop - start], dtype=torch.int32, device="cuda")
            length = torch.tensor([stop], dtype=torch.int32, device="cuda")
            part = PagedBatch(starts, length, batch.page_table, stop - start, stop)
            own = select_tiles(q[start:stop], k_pages, part, prompt_lens=lens, **options)
            out = paged_attention(q[start:stop], k_pages, v_pages, part, lists=own)
            assert torch.equal(out, whole[start:stop])
