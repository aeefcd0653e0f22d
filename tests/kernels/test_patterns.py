import struct
import zlib

import pytest
import torch
from longreach_kernels import BlockSparse, Causal, Full, Window
from longreach_kernels.analysis.work import work
from longreach_kernels.masks.draw import to_png, to_text
from longreach_kernels.masks.mask import And, Or
from longreach_kernels.masks.patterns import a_shape, bigbird, fixed, local_global, strided, vertical_slash
from longreach_kernels.masks.tile_lists import TileLists, ragged_tile_lists, tile_lists

from tests.kernels.patterns_for_tests import BANDS, LENGTH, LISTED

ALL = LISTED | BANDS


def blocks(mask, num_blocks: int, block: int = 16) -> list[list[int]]:
    """The key blocks that the last query of each block row sees a part of."""
    length = num_blocks * block
    seen = mask.allowed(torch.arange(length), torch.arange(length))
    seen = seen.view(num_blocks, block, num_blocks, block)[:, -1].any(-1)
    return [row.nonzero().flatten().tolist() for row in seen]


def test_strided_is_the_last_blocks_and_every_nth():
    assert blocks(strided(160, block=16, stride=3), 10)[8] == [2, 5, 6, 7, 8]


def test_fixed_is_the_own_stretch_and_summaries():
    assert blocks(fixed(160, block=16, stride=3), 10)[7] == [2, 5, 6, 7]
    assert blocks(fixed(160, block=16, stride=3, summary=2), 10)[7] == [1, 2, 4, 5, 6, 7]


def test_longformer_is_local_and_global_both_ways():
    rows = blocks(local_global(160, block=16, window=1), 10)
    assert rows[0] == list(range(10))
    assert rows[5] == [0, 4, 5, 6]
    assert blocks(local_global(160, block=16, window=1, causal=True), 10)[5] == [0, 4, 5]


def test_bigbird_adds_as_many_random_blocks_as_asked_the_same_for_a_seed():
    mask = bigbird(320, block=16, random_blocks=2, heads=3, seed=7)
    assert mask == bigbird(320, block=16, random_blocks=2, heads=3, seed=7)
    assert mask != bigbird(320, block=16, random_blocks=2, heads=3, seed=8)
    assert isinstance(mask, BlockSparse)
    counts = mask.layout.sum(-1)
    assert counts[:, 5].tolist() == [3 + 1 + 2] * 3
    assert not torch.equal(mask.layout[0], mask.layout[1])
    causal = bigbird(320, block=16, random_blocks=2, causal=True)
    assert not causal.allowed(torch.arange(320), torch.arange(320)).triu(1).any()
    assert blocks(causal, 20)[0] == [0]


def test_a_shape_needs_no_list():
    assert a_shape(4, 1024) == Window(1024, 4)


def test_vertical_slash_covers_its_lines():
    mask = vertical_slash(160, block=16, verticals=[[3, 70], []], slashes=[[0], [0, 40]])
    seen = mask.allowed(torch.arange(160), torch.arange(160))
    assert seen[0, 70:, 70].all()
    assert seen[0, 3:, 3].all()
    assert seen[1].diagonal(-40).all()
    assert seen[:, range(160), range(160)].all()
    assert not seen[0, 150, 100]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: strided(100, stride=0), "stride"),
        (lambda: fixed(100, stride=3, summary=4), "summary"),
        (lambda: local_global(0, window=1), "length"),
        (lambda: bigbird(100, heads=0), "heads"),
        (lambda: vertical_slash(100, verticals=[[1]], slashes=[]), "slashes"),
        (lambda: vertical_slash(100, verticals=[[100]], slashes=[[0]]), "verticals"),
        (lambda: BlockSparse(torch.ones(2, 2)), "layout"),
        (lambda: BlockSparse(torch.ones(2, 2, dtype=torch.bool), block=48), "block"),
        (lambda: bigbird(100, heads=2) & bigbird(100, heads=3), "layout"),
    ],
)
def test_bad_patterns_name_their_argument(make, named):
    with pytest.raises(ValueError, match=rf"^{named}: "):
        make()


def test_a_layout_that_is_too_small_is_an_error():
    mask = strided(100, block=16, stride=2)
    with pytest.raises(ValueError, match=r"^layout: "):
        tile_lists(mask, 120, 120, 32, 32)
    with pytest.raises(ValueError, match=r"^layout: "):
        mask.allowed(torch.arange(120), torch.arange(120))


def test_masks_combine_where_that_has_a_meaning():
    assert (Causal() & Window(4)) == Window(4)
    assert (Causal() | Window(4)) == Causal()
    assert (Full() & Causal()) == Causal()
    assert (Window(4) & Window(9, 2)) == Window(4)
    layout = local_global(64, block=16, window=0)
    assert isinstance(layout & Causal(), And)
    assert isinstance(layout | Causal(), Or)
    positions = torch.arange(64)
    for joined, one, other in (
        (layout & Causal(), layout, Causal()),
        (Window(9, 3) & Window(3, 9), Window(9, 3), Window(3, 9)),
    ):
        a, b = one.allowed(positions, positions), other.allowed(positions, positions)
        assert torch.equal(joined.allowed(positions, positions), a & b)
    assert torch.equal(
        (Window(9, 3) | Window(3, 9)).allowed(positions, positions),
        Window(9, 3).allowed(positions, positions) | Window(3, 9).allowed(positions, positions),
    )
    with pytest.raises(TypeError):
        Causal() & True  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]


def test_masks_print_what_they_are():
    mask = local_global(64, block=16, window=0) & Causal()
    assert repr(mask) == "(BlockSparse(1 x 4 x 4 blocks of 16, 0.625 set) & Causal())"


def unpack(lists: TileLists, head: int, sequence: int = 0) -> torch.Tensor:
    """The pairs that tile lists hold for one sequence, bool (queries, keys)."""
    height, width = lists.tile_q, lists.tile_k
    queries, keys = lists.queries[sequence], lists.keys[sequence]
    num_q_tiles = -(-queries // height)
    first_row = int(lists.first_row[sequence]) + (head * num_q_tiles if lists.heads > 1 else 0)
    out = torch.zeros(num_q_tiles * height, -(-keys // width) * width, dtype=torch.bool)
    for i in range(num_q_tiles):
        row = lists.row(first_row + i)
        assert row == sorted(row, key=lambda entry: (entry[1] >= 0, entry[0]))  # full ones, then partial ones
        assert len({tile for tile, _ in row}) == len(row)
        assert int(lists.partial[first_row + i] - lists.start[first_row + i]) == sum(bits < 0 for _, bits in row)
        for tile, bit_tile in row:
            bits = torch.ones(height, width, dtype=torch.bool)
            if bit_tile >= 0:
                bits = ((lists.bits[bit_tile][:, :, None] >> torch.arange(32)) & 1).bool().flatten(1)
                assert bits.any()
            else:
                assert (tile + 1) * width <= keys
            out[i * height : (i + 1) * height, tile * width : (tile + 1) * width] = bits
    return out[:queries, :keys]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(150, 150), (40, 150), (1, 77), (150, 100)])
def test_tile_lists_hold_exactly_the_mask(name, num_queries, num_keys):
    mask = ALL[name]
    allowed = mask.allowed(torch.arange(num_keys - num_queries, num_keys), torch.arange(num_keys))
    for tile_q, tile_k in ((32, 32), (64, 64), (128, 64)):
        lists = tile_lists(mask, num_queries, num_keys, tile_q, tile_k)
        assert len(lists.bits.unique(dim=0)) == len(lists.bits)
        for head in range(mask.heads):
            expected = allowed if allowed.dim() == 2 else allowed[head]
            assert torch.equal(unpack(lists, head), expected)
            counted = work(mask, num_queries, num_keys, 64, tile_q=tile_q, tile_k=tile_k, head=head)
            assert counted.pairs == int(expected.sum())


@pytest.mark.parametrize("name", ALL)
def test_lists_of_sequences_are_those_of_each(name):
    mask, queries, keys = ALL[name], (70, 0, 1, 150), (100, 64, 0, 150)
    lists = ragged_tile_lists(mask, queries, keys, 32, 64)
    for b, (num_queries, num_keys) in enumerate(zip(queries, keys, strict=True)):
        allowed = mask.allowed(torch.arange(num_keys - num_queries, num_keys), torch.arange(num_keys))
        for head in range(mask.heads):
            expected = allowed if allowed.dim() == 2 else allowed[head]
            assert torch.equal(unpack(lists, head, b), expected)


@pytest.mark.parametrize("name", ALL)
def test_lists_start_with_the_longest(name):
    lists = ragged_tile_lists(ALL[name], (100, 33), (LENGTH, 33), 32, 32)
    counts = lists.start.diff()
    for start, num_tiles in ((0, 4), (4 * lists.heads, 2)):
        for head in range(lists.heads):
            rows = slice(start + head * num_tiles, start + (head + 1) * num_tiles)
            assert sorted(lists.order[rows].tolist()) == list(range(num_tiles))
            assert counts[rows][lists.order[rows].long()].diff().le(0).all()


@pytest.mark.parametrize("name", ALL)
def test_transposed_lists_hold_the_same_tiles(name):
    queries, keys = (100, 40), (LENGTH, 64)
    lists = ragged_tile_lists(ALL[name], queries, keys, 32, 32)
    turned = ragged_tile_lists(ALL[name], queries, keys, 32, 32, by_keys=True)
    assert torch.equal(lists.bits, turned.bits)
    for b in range(2):
        q_tiles, k_tiles = -(-queries[b] // 32), -(-keys[b] // 32)
        for head in range(lists.heads):
            first, first_turned = int(lists.first_row[b]) + head * q_tiles, int(turned.first_row[b]) + head * k_tiles
            tiles = {(i, j, bits) for i in range(q_tiles) for j, bits in lists.row(first + i)}
            columns = [turned.row(first_turned + j) for j in range(k_tiles)]
            assert {(i, j, bits) for j, column in enumerate(columns) for i, bits in column} == tiles
            assert all(column == sorted(column, key=lambda entry: (entry[1] >= 0, entry[0])) for column in columns)


def test_a_causal_pattern_needs_one_bit_tile_whatever_its_length():
    lists = tile_lists(bigbird(4096, block=64, causal=True), 4096, 4096, 64, 64)
    assert len(lists.bits) == 1
    assert (lists.bit_index >= 0).sum() == 64


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (33, 70), (70, 33), (64, 64)])
def test_work_is_exact(name, num_queries, num_keys):
    mask = ALL[name]
    tile_q, tile_k = 16, 32
    counted = work(mask, num_queries, num_keys, 64, tile_q=tile_q, tile_k=tile_k)
    allowed = mask.allowed(torch.arange(num_keys - num_queries, num_keys), torch.arange(num_keys))
    allowed = allowed if allowed.dim() == 2 else allowed[0]
    tiles = keys = flops = 0
    for i in range(0, num_queries, tile_q):
        for j in range(0, num_keys, tile_k):
            tile = allowed[i : i + tile_q, j : j + tile_k]
            if tile.any():
                tiles += 1
                keys += tile.shape[1]
                flops += 4 * tile.numel() * 64
    assert counted.pairs == int(allowed.sum())
    assert counted.density == pytest.approx(int(allowed.sum()) / (num_queries * num_keys))
    assert (counted.tiles, counted.flops, counted.kv_bytes) == (tiles, flops, 2 * keys * 64 * 2)


def test_pictures():
    mask = strided(160, block=16, stride=3)
    assert to_text(mask, 160, 160, size=10).splitlines()[8] == "..#..###+."
    png = to_png(mask, 160, 160, size=10)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == (10, 10)
    start = png.index(b"IDAT")
    length = struct.unpack(">I", png[start - 4 : start])[0]
    rows = zlib.decompress(png[start + 4 : start + 4 + length])
    assert len(rows) == 10 * 11
    assert rows[8 * 11 :][3] == 30  # row 8, block 2: all visible
    assert rows[8 * 11 :][1] == 255
