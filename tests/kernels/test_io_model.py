"""The propositions of the FlashAttention papers, and the simulation against the model."""

import math

import pytest
import torch
from longreach_kernels import Full
from longreach_kernels.analysis.io_model import (
    Tiles,
    flash1,
    flash1_backward,
    flash1_tiles,
    flash2,
    flash2_backward,
    lower_bound,
    standard,
    standard_backward,
)
from longreach_kernels.analysis.io_simulation import flash1_backward as simulate_backward
from longreach_kernels.analysis.io_simulation import flash1_forward as simulate_forward
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall


@pytest.mark.parametrize("tiles", [Tiles(16, 16), Tiles(7, 20), Tiles(100, 3), Tiles(64, 64)])
def test_the_simulation_moves_what_the_model_says_and_computes_attention(tiles):
    n, d = 64, 8
    q, k, v, grad = (torch.randn(n, d, dtype=torch.float64, requires_grad=True) for _ in range(4))
    scale = d**-0.5
    exact, lse = reference.attention(q[None, None], k[None, None], v[None, None], AttentionCall(Full(), scale=scale))
    with torch.no_grad():
        out, row_sum, row_max, traffic = simulate_forward(q, k, v, tiles, scale=scale)
    torch.testing.assert_close(out, exact[0, 0])
    torch.testing.assert_close(row_max + row_sum.log(), lse[0, 0])
    assert traffic == flash1(n, d, tiles, itemsize=8)
    with torch.no_grad():
        *grads, traffic = simulate_backward(grad, q, k, v, out, row_sum, row_max, tiles, scale=scale)
    for got, want in zip(grads, torch.autograd.grad(exact[0, 0], (q, k, v), grad), strict=True):
        torch.testing.assert_close(got, want)
    assert traffic == flash1_backward(n, d, tiles, itemsize=8)


def test_the_block_sparse_simulation_moves_what_the_model_says():
    tiles, n, d = Tiles(8, 16), 64, 8
    layout = torch.rand(8, 4) < 0.4
    layout[:, 0] = True
    q, k, v = torch.randn(3, n, d)
    out, _, _, traffic = simulate_forward(q, k, v, tiles, scale=1.0, layout=layout)
    assert traffic == flash1(n, d, tiles, itemsize=4, visited=int(layout.sum()))
    seen = layout.repeat_interleave(8, 0).repeat_interleave(16, 1)
    torch.testing.assert_close(out, (q @ k.T).masked_fill(~seen, float("-inf")).softmax(-1) @ v)


def test_visiting_all_tiles_is_dense():
    tiles = Tiles(32, 64)
    assert flash1(1024, 64, tiles, visited=32 * 16) == flash1(1024, 64, tiles)
    assert flash2(1024, 64, tiles, visited=32 * 16) == flash2(1024, 64, tiles)


def test_standard_attention_is_quadratic_in_n():
    ratios = [standard(2 * n, 64).total / standard(n, 64).total for n in (4096, 65536)]
    assert ratios == pytest.approx([4, 4], rel=0.02)
    assert standard_backward(65536, 64).total / (2 * 65536**2) == pytest.approx(7, rel=0.02)


@pytest.mark.parametrize("algorithm", [flash1, flash1_backward])
def test_flash_attention_moves_n2_d2_over_m(algorithm):
    """Theta(N^2 d^2 / M) (Dao et al. 2022, theorem 2): the ratio to it is bounded on a grid of N, d and M."""
    ratios = []
    for n in (4096, 16384, 65536):
        for d in (32, 64, 128):
            for sram in (32 << 10, 96 << 10, 192 << 10):
                total = algorithm(n, d, flash1_tiles(d, sram)).total / 2
                ratios.append(total / (n * n * d * d / (sram / 2)))
    assert min(ratios) > 10
    assert max(ratios) < 45
    assert max(ratios) / min(ratios) < 2.5


def test_twice_the_memory_is_half_the_traffic():
    n, d = 65536, 64
    small, large = (flash1(n, d, flash1_tiles(d, sram)).total for sram in (64 << 10, 128 << 10))
    assert small / large == pytest.approx(2, rel=0.02)


def test_flash_beats_standard_where_d2_is_small_against_m():
    assert standard(16384, 64).total / flash1(16384, 64, flash1_tiles(64, 192 << 10)).total > 7


def test_block_sparsity_scales_the_quadratic_term_by_s():
    """Theta(N d + s N^2 d^2 / M) (Dao et al. 2022, proposition 4)."""
    n, d, tiles = 65536, 64, Tiles(64, 128)
    pairs = (n // 64) * (n // 128)
    linear = flash1(n, d, tiles, visited=0).total
    dense = flash1(n, d, tiles).total - linear
    for s in (0.05, 0.25, 0.5):
        visited = int(s * pairs)
        assert flash1(n, d, tiles, visited=visited).total - linear == pytest.approx(visited / pairs * dense)


def test_in_the_lower_bound_regime_flash_moves_its_inputs_and_outputs_a_few_times():
    """With M = Theta(N d) the traffic is Theta(N d), what any algorithm must move (proposition 3)."""
    for n in (512, 1024, 4096):
        d = 64
        sram = 4 * n * d * 2
        total = flash1(n, d, flash1_tiles(d, sram)).total
        assert lower_bound(n, d, sram) <= total <= 3 * lower_bound(n, d, sram)
        assert total < standard(n, d).total


def test_small_query_tiles_lose_to_standard_attention():
    """The B_r trap of the Q outer loop: K and V pass once for each query tile, 2 N^2 d / B_r elements against 4 N^2.
    Below about d / 2 rows the flash algorithm moves more than the standard one."""
    n, d = 16384, 128
    plain = standard(n, d).total
    assert flash2(n, d, Tiles(d // 4, 128)).total > plain
    assert flash2(n, d, Tiles(d, 128)).total < plain
    crossing = next(rows for rows in range(1, 4 * d) if flash2(n, d, Tiles(rows, 128)).total < plain)
    assert crossing == pytest.approx(d / 2, rel=0.1)


def test_the_q_outer_loop_writes_its_output_once():
    tiles = Tiles(128, 128)
    assert flash2(16384, 64, tiles).written == 2 * (16384 * 64 + 16384)
    assert flash1(16384, 64, tiles).written > 100 * flash2(16384, 64, tiles).written
    assert flash2(16384, 64, tiles).total < flash1(16384, 64, tiles).total
    assert flash2_backward(16384, 64, tiles, tiles).total < flash1_backward(16384, 64, tiles).total


def test_tiles_follow_the_paper():
    assert flash1_tiles(64, 4 * 64 * 100 * 2) == Tiles(64, 100)
    assert flash1_tiles(128, 4 * 128 * 30 * 2) == Tiles(30, 30)
    assert flash1_tiles(64, 4 * 64 * 2 + 2).columns == math.ceil(257 / 256)


def test_bad_sizes_name_their_argument():
    with pytest.raises(ValueError, match=r"^sram: "):
        flash1_tiles(128, 512)
    with pytest.raises(ValueError, match=r"^sram: "):
        lower_bound(128, 128, 100)
    with pytest.raises(ValueError, match=r"^rows, columns: "):
        Tiles(0, 4)
