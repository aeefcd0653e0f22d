"""Estimates of how much attention lies in each key tile: what they say, and that kernels and specification agree."""

from __future__ import annotations

import math

import pytest
import torch
from longreach_kernels import PagedBatch
from longreach_kernels.sparse import Antidiagonal, Moments, Pooled
from longreach_kernels.sparse.select import antidiagonal as folded
from longreach_kernels.sparse.select import pooled_launch
from longreach_kernels.sparse.select import reference as specification
from longreach_kernels.sparse.select.query_tiles import query_tiles
from longreach_kernels.sparse.select.reference import Logits
from longreach_kernels.sparse.select.select_tiles import masses
from longreach_kernels.sparse.select.targets import PARTS
from torch import Tensor

from tests.kernels.accuracy import paged
from tests.kernels.test_dynamic import BACKENDS, batch_of, keys_of
from tests.pairwise import thinned


def by_definition(q: Tensor, k: Tensor, first: int, stride: int, window: int | None, tile_k: int) -> Tensor:
    """Antidiagonal mass of one query tile and head, q (n, D), k (N, D) up to its end, pair by pair in fp64."""
    logits = q.double() @ k.double().T * 0.7
    shares = []
    for start in range(0, len(q), stride):
        row = torch.full((-(-len(k) // stride),), float("-inf"), dtype=torch.float64)
        for column in range(len(row)):
            pairs = [(start + stride - 1 - i, column * stride + i) for i in range(stride)]
            total = sum(logits[a, b] for a, b in pairs if a < len(q) and b < len(k))
            near = window is None or (column + 1) * stride > first + start - window + 1
            if column * stride <= first + start and near:
                row[column] = total / stride
        shares.append(torch.softmax(row, 0))
    mass = torch.stack(shares).mean(0)
    return torch.stack([part.sum() for part in mass.split(tile_k // stride)])


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("stride", [4, 16])
def test_the_antidiagonal_estimate_is_what_it_says(stride: int, window: int | None) -> None:
    q, k_pages, _, batch = batch_of()
    tiles = query_tiles(batch, len(q), 32, 32, window)
    mass = specification.antidiagonal_mass(q, k_pages, batch, tiles, Logits(0.7, None, None), stride)
    for slot in tiles.exists.nonzero().flatten().tolist():
        b, first, last = int(tiles.seq[slot]), int(tiles.first[slot]), int(tiles.last[slot])
        begin = int(batch.cu_seqlens_q[b]) + int(tiles.tile[slot]) * 32
        for kv_head in range(2):
            k = keys_of(k_pages, batch, b)[: (last // 32 + 1) * 32, kv_head]
            rows = q[begin : begin + last - first + 1]
            shares = [by_definition(rows[:, h], k, first, stride, window, 32) for h in (2 * kv_head, 2 * kv_head + 1)]
            expected = torch.stack(shares).mean(0)
            got = mass[kv_head, slot, 0].double() / PARTS
            torch.testing.assert_close(got[: len(expected)], expected, atol=1e-6, rtol=0)
            assert not got[len(expected) :].any()


@pytest.mark.parametrize("window", [None, 70])
def test_the_pooled_estimate_is_what_it_says(window: int | None) -> None:
    q, k_pages, _, batch = batch_of()
    tiles = query_tiles(batch, len(q), 32, 32, window)
    mass = specification.pooled_mass(q, k_pages, batch, tiles, Logits(0.7, None, None))
    for slot in tiles.exists.nonzero().flatten().tolist():
        b, first, last = int(tiles.seq[slot]), int(tiles.first[slot]), int(tiles.last[slot])
        begin = int(batch.cu_seqlens_q[b]) + int(tiles.tile[slot]) * 32
        shares = []
        for head in range(4):
            k = keys_of(k_pages, batch, b)[: (last // 32 + 1) * 32, head // 2].double()
            means = torch.stack([tile.mean(0) for tile in k.split(32)])
            logits = q[begin : begin + last - first + 1, head].double() @ means.T * 0.7
            positions, starts = first + torch.arange(len(logits))[:, None], torch.arange(len(means)) * 32
            unseen = starts > positions
            if window is not None:
                unseen |= starts + 32 <= positions - window + 1
            logits = logits.masked_fill(unseen, float("-inf"))
            shares.append(torch.softmax(logits, -1).mean(0))
        expected = torch.stack(shares).view(2, 2, -1).mean(1)
        got = mass[:, slot, 0].double() / PARTS
        torch.testing.assert_close(got[:, : expected.shape[1]], expected, atol=1e-6, rtol=0)
        assert not got[:, expected.shape[1] :].any()


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("tile_q", [32, 64])
@pytest.mark.parametrize(("block", "scale"), [(16, 0.7), (32, 0.1)])
def test_the_moments_estimate_is_what_it_says(block: int, scale: float, window: int | None, tile_q: int) -> None:
    q, k_pages, _, batch = batch_of()
    tiles = query_tiles(batch, len(q), tile_q, 32, window)
    mass = specification.moments_mass(q, k_pages, batch, tiles, Logits(scale, None, None), block)
    limit, frozen = math.sqrt(2 * math.log(block)), 0
    for slot in tiles.exists.nonzero().flatten().tolist():
        b, first, last = int(tiles.seq[slot]), int(tiles.first[slot]), int(tiles.last[slot])
        begin = int(batch.cu_seqlens_q[b]) + int(tiles.tile[slot]) * tile_q
        shares = []
        for head in range(4):
            k = keys_of(k_pages, batch, b)[: (last // 32 + 1) * 32, head // 2].double()
            rows = []
            for position, query in enumerate(q[begin : begin + last - first + 1, head].double(), first):
                logits = torch.full((-(-len(k) // block),), float("-inf"), dtype=torch.float64)
                for number, keys in enumerate(k.split(block)):
                    seen = window is None or (number + 1) * block > position - window + 1
                    if number * block <= position and seen:
                        # Twice the variance as if channels were independent.
                        deviation = scale * (2 * ((query * (keys - keys.mean(0))) ** 2).sum(-1).mean()).sqrt()
                        frozen += int(deviation > limit)
                        excess = deviation**2 / 2 if deviation <= limit else limit * deviation - math.log(block)
                        logits[number] = scale * query @ keys.mean(0) + excess
                rows.append(torch.softmax(logits, 0))
            shares.append(torch.stack([torch.stack([t.sum() for t in row.split(32 // block)]) for row in rows]))
        for strip in range(tile_q // 32):
            rows = torch.stack(shares)[:, strip * 32 : strip * 32 + 32].unflatten(0, (2, 2))
            got = mass[:, slot, strip].double() / PARTS
            if rows.numel():
                expected = rows.square().mean((1, 2)).sqrt()
                torch.testing.assert_close(got[:, : expected.shape[1]], expected, atol=1e-6, rtol=0)
                got = got[:, expected.shape[1] :]
            assert not got.any()
    assert (frozen > 0) == (scale > 0.5), "both sides of the limit are looked at"


def test_the_excess_of_a_block_is_its_second_cumulant() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 16, generator=generator), torch.randn(4096, 16, generator=generator) * 0.3 + 0.1
    mean, variance = q @ k.mean(0), q.square() @ k.var(0, unbiased=False)
    exact = torch.logsumexp(q @ k.T, -1) - math.log(4096)
    assert abs(exact - mean - variance / 2) < 0.1 * abs(exact - mean)


def moved(batch: PagedBatch, device: torch.device) -> PagedBatch:
    tensors = (x.to(device) for x in (batch.cu_seqlens_q, batch.context_lens, batch.page_table))
    return PagedBatch(*tensors, batch.max_seqlen_q, batch.max_context_len, batch.num_decodes)


@pytest.mark.parametrize(
    ("estimator", "options"),
    thinned(
        [Antidiagonal(4), Antidiagonal(16), Moments(16), Moments(32), Pooled()],
        [{}, {"window": 70}, {"softcap": 3.0}, {"head_dim": 24, "page_size": 4}],
        count=5,
        strength=1,
    ),
    ids=str,
)
def test_the_kernels_agree_with_the_specification(estimator, options: dict, device: torch.device) -> None:
    options = dict(options)
    window, softcap = options.pop("window", None), options.pop("softcap", None)
    q, k_pages, _, batch = batch_of(**options)
    on_host = batch
    tiles = query_tiles(batch, len(q), 32, 32, window)
    logits = Logits(0.7, softcap, None)
    here = [x.to(device) for x in (q, k_pages)]
    batch = moved(batch, device)
    there = query_tiles(batch, len(q), 32, 32, window)
    if isinstance(estimator, Pooled):
        got = pooled_launch.pooled_mass(*here, batch, there, logits)
        expected = specification.pooled_mass(q, k_pages, on_host, tiles, logits)
    elif isinstance(estimator, Moments):
        got = pooled_launch.pooled_mass(*here, batch, there, logits, estimator.block)
        expected = specification.moments_mass(q, k_pages, on_host, tiles, logits, estimator.block)
    else:
        got = folded.antidiagonal_mass(*here, batch, there, logits, estimator.stride)
        expected = specification.antidiagonal_mass(q, k_pages, on_host, tiles, logits, estimator.stride)
    torch.testing.assert_close(got.cpu().double() / PARTS, expected.double() / PARTS, atol=2e-6, rtol=0)


def compare_pooled(
    q: Tensor, k_pages: Tensor, batch: PagedBatch, device: torch.device, block: int | None, **options
) -> tuple[Tensor, Tensor]:
    """Masses by the kernels and by the specification, fp64."""
    window, logits = options.get("window"), Logits(options.get("scale", 0.7), options.get("softcap"), None)
    sizes = len(q), options.get("tile_q", 32), 32, window
    there, tiles = moved(batch, device), query_tiles(batch, *sizes)
    of_device = query_tiles(there, *sizes)
    got = pooled_launch.pooled_mass(q.to(device), k_pages.to(device), there, of_device, logits, block)
    given = (q, k_pages, batch, tiles, logits)
    expected = specification.pooled_mass(*given) if block is None else specification.moments_mass(*given, block)
    return got.cpu().double() / PARTS, expected.double() / PARTS


@pytest.mark.parametrize(
    ("block", "options"),
    thinned(
        [None, 16, 32],
        [{}, {"softcap": 3.0}, {"window": 400}, {"tile_q": 64}, {"tile_q": 16}],
        count=3,
        strength=1,
    ),
    ids=str,
)
def test_steps_that_all_queries_see_and_steps_that_some_see(block: int | None, options: dict, device) -> None:
    """Steps of 16 blocks or more: the sequences have up to four of them, of which all but one need no mask."""
    q, k_pages, _, batch = paged([1, 70, 200], [600, 1000, 777], 16, 4, 2, 16, num_decodes=1)
    torch.testing.assert_close(*compare_pooled(q, k_pages, batch, device, block, **options), atol=2e-6, rtol=0)


@pytest.mark.parametrize("block", [None, 16])
def test_programs_take_turns(block: int | None, device, monkeypatch: pytest.MonkeyPatch) -> None:
    """28 items, some of which hold no tile, among 2, 6 and 14 programs, and among as many."""
    q, k_pages, _, batch = paged([3, 100, 20], [80, 300, 20], 16, 4, 2, 16)
    masses = []
    for processors in (1, 3, 7, 500):
        monkeypatch.setattr(pooled_launch, "processors", lambda _, n=processors: n)
        got, expected = compare_pooled(q, k_pages, batch, device, block)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
        masses.append(got)
    assert all(torch.equal(mass, masses[0]) for mass in masses)


@pytest.mark.parametrize("block", [None, 16])
def test_queries_that_see_nothing(block: int | None, device) -> None:
    """Sequences shorter than a tile, and with more queries than keys: the first queries come before all keys."""
    q, k_pages, _, batch = paged([40, 1, 5, 70, 33], [30, 1, 9, 60, 8], 16, 4, 2, 16)
    torch.testing.assert_close(*compare_pooled(q, k_pages, batch, device, block), atol=2e-6, rtol=0)


@pytest.mark.parametrize("block", [None, 16])
def test_a_tile_that_sees_nothing(block: int | None, device) -> None:
    q, k_pages, _, batch = paged([70], [35], 16, 4, 2, 16)
    tiles = query_tiles(moved(batch, device), len(q), 32, 32, None)
    given = q.to(device), k_pages.to(device), moved(batch, device), tiles
    mass = pooled_launch.pooled_mass(*given, Logits(0.7, None, None), block)
    assert mass.sum(-1).eq(0).tolist() == [[[True], [False], [False]]] * 2


@pytest.mark.parametrize("block", [None, 16])
def test_queries_that_see_nothing_of_the_first_step(block: int | None, device) -> None:
    """Of 256 keys; of those behind it they see, whose logits' exponentials are 0 but for their maximum."""
    q, k_pages, _, batch = paged([32], [300], 16, 2, 2, 16)
    q[..., 0], k_pages[..., 0] = 1.0, -300.0
    got, expected = compare_pooled(q, k_pages, batch, device, block, scale=1.0, window=20)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    assert expected.gt(0).any()


@pytest.mark.parametrize(
    "logits",
    [
        pytest.param([0.0] + [-14.3125] * 32, id="shares of 2^-21"),
        pytest.param([-16.0] * 8 + [-11.0] * 8 + [-6.0] * 8 + [-1.0] * 8 + [0.0], id="maxima that grow"),
        pytest.param([61440.0] * 20, id="beyond half precision"),
        pytest.param([-61440.0] * 20, id="below half precision"),
        pytest.param([-61440.0] * 8 + [-100.0] * 8 + [0.0] * 9 + [-61440.0], id="from nothing to everything"),
        pytest.param([61440.0] * 8 + [0.0] * 8 + [61440.0] * 9 + [-61440.0], id="from everything to nothing"),
    ],
)
def test_sums_in_half_precision(logits: list[float], device) -> None:
    """Each logit is that of all keys in a tile, eight of which are a step. A sum of exponentials is rounded to 11 bits,
    so that a share, and a root of a mean of squares of shares, is off by no more than 2^-11 of itself, beside a unit
    that masses are counted in. Means are exact and variances 0: the interpreter cannot multiply bfloat16."""
    q, k_pages, _, batch = paged([32], [32 * len(logits)], 16, 2, 2, 16, dtype=torch.float16)
    q.zero_()
    k_pages.zero_()
    q[..., 0] = 1.0
    for tile, logit in enumerate(logits):
        k_pages[batch.page_table[0, 2 * tile : 2 * tile + 2].long(), ..., 0] = logit
    got, expected = compare_pooled(q, k_pages, batch, device, 16, scale=1.0)
    torch.testing.assert_close(got, expected, atol=1.5 / PARTS, rtol=2**-11)
    assert expected.gt(0).sum() >= 2 * 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("estimator", [Antidiagonal(8), Moments(16), Pooled()], ids=repr)
def test_8_bit_keys_are_scaled(estimator, backend: str) -> None:
    q, k_pages, _, batch = batch_of()
    scales = torch.tensor([0.5, 3.0])
    tiles, logits = query_tiles(batch, len(q), 32, 32, None), Logits(0.7, None, scales)
    quantized = (k_pages / scales[:, None]).to(torch.float8_e4m3fn)
    exact = quantized.float() * scales[:, None]
    got = masses(q, quantized, batch, tiles, logits, estimator, backend)
    want = masses(q, exact, batch, tiles, Logits(0.7, None, None), estimator, backend)
    torch.testing.assert_close(got.double() / PARTS, want.double() / PARTS, atol=1e-5, rtol=0)


@pytest.mark.gpu
class TestOnGpu:
    LENGTHS = ([1, 700, 1500, 256], [900, 2000, 1500, 3000])

    def inputs(self, head_dim: int = 128, page_size: int = 128):
        return paged(*self.LENGTHS, page_size, 8, 2, head_dim, torch.bfloat16, "cuda", num_decodes=1)

    @pytest.mark.parametrize("page_size", [16, 128])
    @pytest.mark.parametrize("estimator", [Antidiagonal(8), Antidiagonal(16), Moments(), Pooled()], ids=repr)
    def test_the_kernels_agree_with_the_specification(self, estimator, page_size: int) -> None:
        q, k_pages, _, batch = self.inputs(page_size=page_size)
        on_host = PagedBatch(
            *(x.cpu() for x in (batch.cu_seqlens_q, batch.context_lens, batch.page_table)), 1500, 3000, 1
        )
        logits, sizes = Logits(0.3, None, None), (len(q), 128, 128, None)
        got = masses(q, k_pages, batch, query_tiles(batch, *sizes), logits, estimator, "auto")
        tiles = query_tiles(on_host, *sizes)
        want = masses(q.cpu(), k_pages.cpu(), on_host, tiles, logits, estimator, "reference")
        torch.testing.assert_close(got.cpu().double() / PARTS, want.double() / PARTS, atol=1e-4, rtol=1e-3)
