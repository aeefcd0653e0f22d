"""The Hopper backward kernel: its buffers in the interpreter, what its compiler makes of it, and gradients on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from longreach_kernels import Causal, Full, Mask, Window, attention, ragged_attention
from longreach_kernels.backends.hopper import backward_launch
from longreach_kernels.backends.hopper.backward_padding import grad_q_kernel, statistics_kernel
from longreach_kernels.backends.hopper.config import BACKWARD_HEAD_DIMS, backward_config
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall
from torch import Tensor

from tests.kernels.accuracy import eager_low_precision, qkv, tolerance
from tests.kernels.compiled import compiled
from tests.pairwise import thinned

SHARED_BYTES = 227 * 1024  # that a block may use on sm_90
BLOCK_M, HEAD_DIM = 16, 32

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is tested where there is no GPU")


@pytest.fixture
def starts() -> Tensor:
    """Of sequences of 5, 0, 40 and 16 tokens, which do not begin at 0."""
    return torch.tensor([3, 8, 8, 48, 64], dtype=torch.int32)


def tile_rows(starts: Tensor, tile: int, block_m: int) -> list[int]:
    """The tokens of a tile, by the rule that sequence b begins at tile (start - origin) // block_m + b."""
    for b, (start, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        first = (start - int(starts[0])) // block_m + b
        if first <= tile < first + math.ceil((end - start) / block_m):
            low = start + (tile - first) * block_m
            return list(range(low, min(low + block_m, end)))
    return []


def tile_of(starts: Tensor, token: int, block_m: int) -> int:
    """The tile that holds a token."""
    return next(t for t in range(int(starts[-1])) if token in tile_rows(starts, t, block_m))


@interpreted
def test_statistics_of_ragged_sequences_begin_at_tiles(starts: Tensor) -> None:
    tokens, heads = 64, 2
    tiles = (tokens - 3) // BLOCK_M + 4
    out, grad = torch.randn(tokens, heads, HEAD_DIM), torch.randn(tokens, heads, HEAD_DIM)
    lse, grad_lse = torch.randn(tokens, heads), torch.randn(tokens, heads)
    lse[10] = float("-inf")
    delta, stats = torch.zeros(tokens, heads), torch.full((heads, tiles, 2, BLOCK_M), float("nan"))
    strides = ((0, x.stride(1), x.stride(0)) for x in (out, grad, lse, grad_lse))
    numbers = [s for three in strides for s in three]
    statistics_kernel[(tiles, heads)](
        out, grad, lse, grad_lse, delta, stats, starts, *numbers, 4, heads, tokens,
        HEAD_DIM=HEAD_DIM, BLOCK_M=BLOCK_M, RAGGED=True, HAS_GRAD_LSE=True,
    )  # fmt: skip
    expected = (out * grad).sum(-1) - grad_lse
    torch.testing.assert_close(delta[3:], expected[3:])
    for tile in range(tiles):
        rows = tile_rows(starts, tile, BLOCK_M)
        want = torch.full((heads, BLOCK_M), float("inf"))
        want[:, : len(rows)] = torch.where(lse[rows].isfinite(), lse[rows] / math.log(2), float("inf")).T
        torch.testing.assert_close(stats[:, tile, 0], want)
        torch.testing.assert_close(stats[:, tile, 1, : len(rows)], expected[rows].T)
        assert not stats[:, tile, 1, len(rows) :].any()


def in_kernel_order(sums: Tensor) -> Tensor:
    """Sums (..., BLOCK_M, HEAD_DIM), 8192 of a tile, in the order that `padded` describes: (..., 8192)."""
    block_m, head_dim = sums.shape[-2:]
    rows, columns = torch.meshgrid(torch.arange(block_m), torch.arange(head_dim), indexing="ij")
    half = rows // 64 + columns // 64
    row, column = rows % 64, columns % 64
    place = half * 4096 + column // 8 * 512 + row // 16 * 128 + row % 8 * 16 + column % 8 // 2 * 4 + row % 16 // 8 * 2
    place += column % 2
    flat = torch.full((*sums.shape[:-2], 8192), float("nan"))
    flat[..., place.flatten()] = sums.flatten(-2)
    return flat


@interpreted
@pytest.mark.parametrize("head_dim", BACKWARD_HEAD_DIMS)
def test_grad_q_is_zero_where_no_key_tile_was_added(head_dim: int) -> None:
    block_m, tokens, heads = backward_config(head_dim).block_m, 300, 2
    starts = torch.tensor([3, 8, 8, 160, tokens], dtype=torch.int32)
    tiles = (tokens - 3) // block_m + 4
    sums = torch.randn(heads, tiles, block_m, head_dim)
    counters = torch.ones(heads, tiles, dtype=torch.int32)
    counters[1, tile_of(starts, 200, block_m)] = 0
    grad = torch.full((tokens, heads, head_dim), float("nan"))
    grad_q_kernel[(tiles, heads)](
        in_kernel_order(sums), counters, grad, starts, 0, grad.stride(1), grad.stride(0), 4, heads, tokens, 0.5,
        HEAD_DIM=head_dim, BLOCK_M=block_m, RAGGED=True,
    )  # fmt: skip
    assert grad[:3].isnan().all()  # they belong to no sequence
    for tile in range(tiles):
        rows = tile_rows(starts, tile, block_m)
        want = sums[:, tile, : len(rows)] * 0.5 * (counters[:, tile, None, None] > 0)
        torch.testing.assert_close(grad[rows].transpose(0, 1), want)
    assert not grad[200, 1].any()
    assert grad[200, 0].any()


def test_it_leaves_the_rest_to_the_portable_kernels() -> None:
    q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
    assert all(backward_launch.supports(q, m, None) for m in (Causal(), Full(), Window(7)))
    assert not backward_launch.supports(q, Window(7, 2), None)
    assert not backward_launch.supports(q, Causal(), 30.0)
    assert not backward_launch.supports(q[..., :96], Causal(), None)
    assert not backward_launch.supports(q.float(), Causal(), None)


@pytest.mark.parametrize(
    ("group", "tokens", "heads", "expected"), [(1, 16384, 16, 2), (4, 16384, 8, 1), (1, 512, 3, 3)]
)
def test_sections_fit_the_cache(group: int, tokens: int, heads: int, expected: int) -> None:
    assert backward_launch.section(group, tokens, 128, heads) == expected


# Every variant and every head dim once; another case each day; LONGREACH_TEST_FULL=1 for all.
COMPILED = thinned(
    BACKWARD_HEAD_DIMS, ["dense causal", "dense full", "ragged causal", "ragged window"], count=1, strength=1
)


def test_configurations_compile_for_sm90_with_their_accumulators_in_registers() -> None:
    names = [f"{head_dim}:{variant}" for head_dim, variant in COMPILED]
    made = compiled("tests.kernels.compile_hopper_backward", *names)
    assert made.keys() == set(names)
    for name, facts in made.items():
        assert facts["stack_bytes"] < 150, (name, facts)  # one fp32 tile of 64x64 would be 128 more for each product
        assert facts["shared_bytes"] <= SHARED_BYTES, (name, facts)
        assert facts["wgmma"] == 2 * 32, (name, facts)  # both consumers, five products, one of them in two parts
        assert facts["waits"] == 2 * 4, (name, facts)
        assert facts["exposed"] == 0, (name, facts)
        assert facts["tma_loads"] > 0, (name, facts)
        assert facts["tma_reductions"] > 0, (name, facts)


hopper = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),  # a wait without an end would hang
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
MASKS = [Causal(), Full(), Window(1), Window(100), Window(1000)]
LENGTHS = [(1, 1), (239, 1), (799, 3), (1023, 1024), (108, 256), (1, 2049), (127, 2097), (128, 128), (2112, 2112)]


def gradients(out: Tensor, leaves: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, grad)


def check(got: tuple[Tensor, ...], tensors: tuple[Tensor, ...], grad: Tensor, mask: Mask) -> None:
    """Hold dq, dk, dv of a dense batch to the rule of `accuracy.tolerance`."""
    scale = tensors[0].shape[-1] ** -0.5
    exact_leaves = [x.double().requires_grad_() for x in tensors]
    exact = gradients(
        reference.attention(*exact_leaves, AttentionCall(mask, scale=scale))[0], exact_leaves, grad.double()
    )
    leaves = [x.clone().requires_grad_() for x in tensors]
    eager = gradients(eager_low_precision(*leaves, mask, scale, None, None), leaves, grad)
    for name, x, want, low in zip("qkv", got, exact, eager, strict=True):
        error, allowed = (x.double() - want).abs().max().item(), tolerance(want, low, x.dtype)
        assert error <= allowed, f"d{name} is off by {error:.3g}, {allowed:.3g} allowed"


class TestOnHopper:
    pytestmark = hopper

    @pytest.mark.parametrize(
        ("lengths", "mask", "head_dim"), thinned(LENGTHS, MASKS, BACKWARD_HEAD_DIMS, count=12), ids=str
    )
    def test_dense(self, lengths: tuple[int, int], mask: Mask, head_dim: int) -> None:
        for dtype, heads in ((torch.bfloat16, (8, 2)), (torch.float16, (3, 3)), (torch.bfloat16, (3, 1))):
            tensors = qkv(2, *heads, *lengths, head_dim, dtype, "cuda")
            assert backward_launch.supports(tensors[0], mask, None)
            leaves = [x.clone().requires_grad_() for x in tensors]
            grad = torch.randn_like(tensors[0])
            check(gradients(attention(*leaves, mask, backend="hopper"), leaves, grad), tensors, grad, mask)

    @pytest.mark.parametrize("head_dim", BACKWARD_HEAD_DIMS)
    @pytest.mark.parametrize("mask", [Causal(), Full(), Window(60)], ids=repr)
    def test_ragged_sequences_are_computed_as_if_alone(self, mask: Mask, head_dim: int) -> None:
        q_lens, k_lens = [5, 0, 130, 1, 564, 300], [5, 70, 200, 1, 564, 0]
        cu_q, cu_k = (torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (q_lens, k_lens))
        shapes = ((sum(q_lens), 8), (sum(k_lens), 2), (sum(k_lens), 2))
        leaves = [torch.randn(*s, head_dim, device="cuda").bfloat16().requires_grad_() for s in shapes]
        grad = torch.randn_like(leaves[0])
        got = gradients(ragged_attention(*leaves, cu_q, cu_k, mask, backend="hopper"), leaves, grad)
        for i in range(len(q_lens)):
            rows = [slice(int(cu[i]), int(cu[i + 1])) for cu in (cu_q, cu_k, cu_k)]
            parts = [x.detach()[r].transpose(0, 1)[None].contiguous() for x, r in zip(leaves, rows, strict=True)]
            if not q_lens[i] or not k_lens[i]:
                assert not any(x[r].any() for x, r in zip(got, rows, strict=True))
                continue
            alone = [x.requires_grad_() for x in parts]
            part_grad = grad[rows[0]].transpose(0, 1)[None].contiguous()
            want = gradients(attention(*alone, mask, backend="hopper"), alone, part_grad)
            for x, r, other in zip(got, rows, want, strict=True):
                assert torch.equal(x[r], other[0].transpose(0, 1))

    def test_log_sum_exps_have_gradients(self) -> None:
        q, k, v = (x.requires_grad_() for x in qkv(1, 4, 2, 200, 200, 128, torch.bfloat16, "cuda"))
        _, lse = attention(q, k, v, Full(), backend="hopper", return_lse=True)
        (dq,) = torch.autograd.grad(lse.sum(), (q,))
        expected = attention(q, k, k, Full(), backend="reference") * 128**-0.5  # the mean key, scaled
        torch.testing.assert_close(dq, expected, atol=2e-3, rtol=2e-2)

    @pytest.mark.parametrize("heads", [(8, 2), (16, 16)])
    def test_a_hundred_runs_are_equal_to_the_bit(self, heads: tuple[int, int]) -> None:
        """Long enough that programs of many key tiles meet at a query tile, and wait for one another."""
        q, k, v = (x.requires_grad_() for x in qkv(1, *heads, 4096, 4096, 128, torch.bfloat16, "cuda"))
        grad = torch.randn_like(q)
        first = gradients(attention(q, k, v, Causal(), backend="hopper"), [q, k, v], grad)
        for _ in range(100):
            again = gradients(attention(q, k, v, Causal(), backend="hopper"), [q, k, v], grad)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
