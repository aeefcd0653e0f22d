"""Rules on blocks agree with the patterns of the same name, with themselves at any length, and with their counts."""

import itertools

import pytest
import torch
from longreach_kernels import Causal, Window, attention
from longreach_kernels.analysis.work import work
from longreach_kernels.masks.block_rules import (
    BigBird,
    LocalGlobal,
    Strided,
    VerticalSlash,
    for_heads,
    within_window,
)
from longreach_kernels.masks.draw import coverage
from longreach_kernels.masks.patterns import local_global, strided, vertical_slash
from longreach_kernels.masks.tile_counts import sampled_coverage, tile_count
from longreach_kernels.masks.tile_lists import tile_lists
from longreach_kernels.sizes import TILE

LENGTH = 11 * TILE + 37
RULES = {
    "strided": Strided(3),
    "strided by head": Strided(3, per_head=True),
    "local and global": LocalGlobal(2, 1),
    "bigbird": BigBird(2, 1, 2, seed=5),
    "bigbird by head": BigBird(2, 1, 2, seed=5, groups=2),
    "vertical-slash": VerticalSlash((5, 700), (0, 130, 513)),
}
MASKS = RULES | {
    "window": Window(300, 5),
    "both": Window(700) & Strided(3),
    "causal": Causal(),
}


def everything(mask, length=LENGTH):
    at = torch.arange(length)
    seen = mask.allowed(at, at)
    return seen if seen.dim() == 3 else seen[None]


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        (RULES["strided"], strided(LENGTH, stride=3)),
        (RULES["local and global"], local_global(LENGTH, window=1, causal=True)),
        (RULES["vertical-slash"], vertical_slash(LENGTH, block=128, verticals=[[5, 700]], slashes=[[0, 130, 513]])),
    ],
)
def test_a_rule_is_the_pattern_of_its_name(rule, pattern):
    assert torch.equal(everything(rule), everything(pattern))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_is_causal_shows_each_query_itself_and_the_blocks_of_its_row(rule):
    seen = everything(rule)
    assert not seen.triu(1).any()
    assert seen.diagonal(dim1=1, dim2=2).all()
    for head in range(rule.heads):
        for i in (0, 4, LENGTH // TILE):
            last = seen[head, min((i + 1) * TILE, LENGTH) - 1, : i * TILE + 1 : TILE]
            assert rule.row(i, head).tolist() == last.nonzero().flatten().tolist()
    near = (rule.local - 1) * TILE + 1
    band = everything(Window(near))
    assert (seen | ~band).all()
    assert rule.contains_window(near)
    assert not rule.contains_window(near + 1)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("chunk", [(0, LENGTH), (5 * TILE, 300), (513, 1), (700, 345)])
def test_lists_of_a_chunk_hold_the_rows_of_the_whole(rule, chunk):
    start, length = chunk
    lists = tile_lists(rule, length, start + length, 64, 64)
    found = torch.zeros(rule.heads, length, start + length, dtype=torch.bool)
    tiles = -(-length // 64)
    for head in range(rule.heads):
        for i in range(tiles):
            for tile, bits in lists.row(head * tiles + i):
                rows = slice(i * 64, min((i + 1) * 64, length))
                keys = slice(tile * 64, min((tile + 1) * 64, start + length))
                shown = torch.ones(64, 64, dtype=torch.bool)
                if bits >= 0:
                    shown = ((lists.bits[bits][..., None] >> torch.arange(32)) & 1).flatten(1).bool()
                found[head, rows, keys] = shown[: rows.stop - rows.start, : keys.stop - keys.start]
    assert torch.equal(found, everything(rule, start + length)[:, start:])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("q", "k"),
    [
        (range(700, 1000), range(1000)),
        ((999, 3, 640), range(1000)),  # far apart
        (range(500, 800), (0, 799, 130)),
        ((999, 3), (0, 799)),
    ],
)
def test_a_matrix_of_positions_is_seen_as_each_of_its_pairs(rule, q, k):
    q, k, head = torch.tensor(q), torch.tensor(k), torch.arange(rule.heads)
    matrix = rule.sees(q[None, :, None], k[None, None], head[:, None, None])
    one_by_one = rule.sees(*(x.flatten() for x in torch.meshgrid(q, k, indexing="ij")), head[:, None])
    assert torch.equal(matrix.flatten(1).expand(rule.heads, -1), one_by_one.expand(rule.heads, -1))


def test_random_blocks_depend_on_seed_and_head_alone_and_differ():
    one, other = BigBird(1, 0, 3, seed=1, groups=2), BigBird(1, 0, 3, seed=2, groups=2)
    rows = [one.row(i, 0).tolist() for i in range(40)]
    assert rows == [BigBird(1, 0, 3, seed=1, groups=2).row(i, 0).tolist() for i in range(40)]
    assert rows != [one.row(i, 1).tolist() for i in range(40)]
    assert rows != [other.row(i, 0).tolist() for i in range(40)]
    drawn = [block for i in range(400, 4000, 9) for block in (BigBird(1, 0, 1).row(i)[:-1] / i).tolist()]
    assert len(drawn) == 400
    assert abs(sum(drawn) / 400 - 0.5) < 0.05


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_counts_are_those_of_the_whole_matrix_and_of_work(mask):
    count, seen = tile_count(mask, 0, LENGTH), everything(mask)
    padded = torch.zeros(mask.heads, *[-(-LENGTH // TILE) * TILE] * 2, dtype=torch.bool)
    padded[:, :LENGTH, :LENGTH] = seen
    assert count.pairs == int(seen.sum())
    assert count.tiles == int(padded.unfold(1, TILE, TILE).unfold(2, TILE, TILE).flatten(3).any(-1).sum())
    assert count.causal_pairs == mask.heads * LENGTH * (LENGTH + 1) // 2
    works = [work(mask, LENGTH, LENGTH, 64, tile_q=TILE, tile_k=TILE, head=h) for h in range(mask.heads)]
    assert (count.tiles, count.pairs) == (sum(w.tiles for w in works), sum(w.pairs for w in works))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_counts_of_the_parts_of_a_sequence_add_up(mask):
    cuts = [0, 3 * TILE, 3 * TILE, 8 * TILE, LENGTH]
    parts = [tile_count(mask, a, b) for a, b in itertools.pairwise(cuts)]
    assert sum(parts[1:], parts[0]) == tile_count(mask, 0, LENGTH)
    odd = [tile_count(mask, a, b) for a, b in ((0, 700), (700, 701), (701, LENGTH))]
    assert sum(part.pairs for part in odd) == tile_count(mask, 0, LENGTH).pairs


def test_a_sample_of_rows_estimates_the_density():
    length = 4000 * TILE
    whole, some = tile_count(Strided(9), 0, length), tile_count(Strided(9), 0, length, most_rows=333)
    assert some.causal_tiles < whole.causal_tiles / 10
    assert abs(some.density - whole.density) < 0.02 * whole.density


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_coverage_is_exact_where_all_pairs_are_looked_at_and_near_it_elsewhere(mask):
    exact = sum(coverage(mask, 640, 640, size=10, head=h) for h in range(mask.heads)) / mask.heads
    assert torch.allclose(sampled_coverage(mask, 640, size=10, samples=64), exact, atol=1e-5)
    rough = sampled_coverage(mask, 640, size=10, samples=16)
    assert (rough - exact).abs().max() < 0.2
    assert sampled_coverage(mask, 97, size=10, samples=10).shape == (10, 10)


def test_a_model_s_own_window_stays_as_it_is_where_the_pattern_shows_all_of_it():
    assert within_window(Window(32), LocalGlobal(2)) == Window(32)
    assert within_window(Window(130), LocalGlobal(2)).band is None
    assert within_window(Causal(), LocalGlobal(2)) == LocalGlobal(2)
    assert within_window(Window(32), Window(64, 4)) == Window(32)
    assert within_window(Causal(), Window(64, 4)) == Window(64, 4)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_attention_under_a_rule_is_that_of_the_reference(rule):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 200, 32, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 900, 32, generator=generator, dtype=torch.float64).unbind(0)
    expected = attention(q, k, v, rule, backend="reference")
    assert torch.allclose(attention(q, k, v, rule, backend="cpu"), expected)


@pytest.mark.parametrize(
    ("heads", "groups", "ranks"), [(8, 2, 2), (8, 2, 4), (8, 4, 2), (12, 2, 3), (6, 3, 2), (8, 1, 2)]
)
def test_parts_of_the_heads_under_a_rule_are_those_of_all_of_them(heads, groups, ranks):
    rule = BigBird(1, 0, 1, seed=5, groups=groups)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, 1100, 16, generator=generator, dtype=torch.float64).unbind(0)
    expected = attention(q, k, v, rule, backend="reference")
    share = heads // ranks
    for rank in range(ranks):
        part = range(rank * share, (rank + 1) * share)
        own = for_heads(rule, part, heads)
        assert own.heads <= groups
        got = attention(*(x[:, part.start : part.stop] for x in (q, k, v)), own, backend="cpu")
        assert torch.allclose(got, expected[:, part.start : part.stop])


def test_heads_that_a_rule_cannot_be_had_for_are_refused():
    with pytest.raises(ValueError, match="the 2 that the rule tells apart do not divide 3"):
        for_heads(Strided(3, per_head=True), range(1), 3)
    with pytest.raises(TypeError, match="only block rules"):
        for_heads(Strided(3, per_head=True) & Window(9), range(2), 4)


def test_impossible_rules_are_refused_by_name():
    with pytest.raises(ValueError, match="stride: must be an int of at least 1"):
        Strided(0)
    with pytest.raises(ValueError, match="window: "):
        LocalGlobal(0)
    with pytest.raises(ValueError, match="random_blocks: "):
        BigBird(1, 1, -1)
    with pytest.raises(ValueError, match="slashes: "):
        VerticalSlash((), (-1,))
