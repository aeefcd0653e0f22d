import itertools

import pytest
import torch
from longreach_kernels import Causal, Full, Window
from longreach_kernels.masks.tile_ranges import TileRange, key_ranges

MASKS = [Full(), Causal(), Window(1), Window(5), Window(40), Window(7, 2), Window(7, 20), Window(100, 3)]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_ranges_cover_what_is_seen_and_are_full_where_they_say_so(mask):
    spans = [(-5, 3), (-5, -1), (0, 1), (0, 16), (5, 9), (16, 32), (20, 33), (30, 64), (63, 64)]
    for num_keys, (q0, q1), tile in itertools.product((1, 13, 33, 64), spans, (1, 4, 16)):
        if q1 > num_keys:
            continue
        allowed = mask.allowed(torch.arange(q0, q1), torch.arange(num_keys))
        covered = torch.zeros(num_keys, dtype=torch.bool)
        previous = 0
        for r in key_ranges(mask, q0, q1, num_keys, tile):
            assert previous <= r.start < r.end <= -(-num_keys // tile)
            previous = r.end
            covered[r.start * tile : r.end * tile] = True
            if not r.partial:
                assert r.end * tile <= num_keys
                assert allowed[:, r.start * tile : r.end * tile].all()
        assert not allowed[:, ~covered].any()


def test_interior_tiles_of_a_long_causal_row_are_not_masked():
    assert key_ranges(Causal(), 1024, 1152, 4096, 128) == (TileRange(0, 8, False), TileRange(8, 9, True))


def test_a_window_never_visits_more_than_it_holds():
    ranges = key_ranges(Window(4096), 100_000, 100_128, 131_072, 128)
    assert sum(r.end - r.start for r in ranges) <= 4096 // 128 + 2
    assert [r.partial for r in ranges] == [True, False, True]
