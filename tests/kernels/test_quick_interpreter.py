"""The interpreter that `tests/quick_interpreter.py` has changed computes what triton's own does, and refuses alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from longreach_kernels import Causal, Window, paged_attention
from longreach_kernels.sparse import Moments
from longreach_kernels.sparse.select.query_tiles import query_tiles
from longreach_kernels.sparse.select.reference import Logits
from longreach_kernels.sparse.select.select_tiles import masses
from torch import Tensor

from tests.kernels.accuracy import paged
from tests.quick_interpreter import slowly

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")

N = 16


@triton.jit
def _spread(x, axis: tl.constexpr):
    return tl.max(x, axis) - tl.min(x, axis)


@triton.jit
def _operations(ints, floats, out_ints, out_floats, n, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    seen = row < n - tl.program_id(0)
    x = tl.load(floats + row, mask=seen, other=0.5)
    square = x[:, None] * x[None, :] + row[:, None]
    halves = tl.dot(square.to(tl.float16), tl.trans(square).to(tl.float16))
    y = _spread(tl.where(row[:, None] > column[None, :], halves, -square), 1)
    i = tl.load(ints + row)
    i = i * 7 + (i << 28) - tl.cumsum(i, 0) + (i.to(tl.uint8) % 5) + i // 3
    i = i ^ (i.to(tl.int64) >> 3).to(tl.int32)
    tl.atomic_add(out_ints + row, i + tl.argmax(y, 0))
    tl.store(out_floats + tl.program_id(0) * SIZE + row, tl.exp2(-y.to(tl.float32)) + tl.sum(x, 0), mask=seen)


@triton.jit
def _unlike_shapes(out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE))


@triton.jit
def _odd_size(out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), tl.zeros([SIZE + 1], tl.float32))


@triton.jit
def _named_type(out, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 0, (out + tl.arange(0, SIZE)[:, None]).type)


def _of_operations() -> list[Tensor]:
    """Integers overflow: 2^28 times up to 500."""
    generator = torch.Generator().manual_seed(1)
    ints = torch.randint(-500, 500, (N,), generator=generator, dtype=torch.int32)
    outs = [torch.zeros(N, dtype=torch.int32), torch.zeros(3 * N)]
    _operations[(3,)](ints, torch.randn(N, generator=generator), *outs, 14, N)
    return outs


def _of_attention() -> list[Tensor]:
    torch.manual_seed(1)
    q, k_pages, v_pages, batch = paged([1, 20], [40, 33], 16, 4, 2, 16, torch.float16, num_decodes=1)
    out = paged_attention(q, k_pages, v_pages, batch, Window(30, 2) | Causal(), backend="triton")
    tiles = query_tiles(batch, len(q), 32, 32, None)
    return [out, masses(q.float(), k_pages.float(), batch, tiles, Logits(0.7, None, None), Moments(16), "triton")]


@pytest.mark.parametrize("compute", [_of_operations, _of_attention])
def test_results_have_the_same_bits(compute: Callable[[], list[Tensor]]) -> None:
    with slowly():
        expected = compute()
    for got, own in zip(compute(), expected, strict=True):
        assert got.dtype == own.dtype
        assert torch.equal(got, own)
        assert own.any()


def _refused(kernel: Any) -> BaseException:
    with pytest.raises(Exception, match=r"Error") as error:
        kernel[(1,)](torch.zeros(64), N)
    return error.value


@pytest.mark.parametrize("kernel", [_unlike_shapes, _odd_size, _named_type])
def test_errors_are_the_same(kernel: Any) -> None:
    with slowly():
        expected = _refused(kernel)
    assert repr(_refused(kernel)) == repr(expected)
