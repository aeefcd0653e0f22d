import pytest
import torch
from longreach_kernels import (
    BlockSparse,
    Causal,
    Full,
    PagedBatch,
    Window,
    attention,
    paged_attention,
    ragged_attention,
    write_pages,
)
from longreach_kernels.masks.patterns import strided
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.accuracy import check, check_paged, paged, qkv
from tests.kernels.patterns_for_tests import LENGTH, LISTED

LENGTHS = [(1, 1), (239, 1), (799, 3), (255, 256), (1300, 1300), (108, 256), (1, 2047), (127, 1097)]
MASKS = [Full(), Causal(), Window(1), Window(100), Window(5000), Window(100, 4), Window(64, 300)]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_and_masks(lengths, mask):
    q, k, v = qkv(1, 4, 2, *lengths, 64)
    out, lse = attention(q, k, v, mask, backend="cpu", return_lse=True)
    check(out, lse, q, k, v, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_heads_dims_and_dtypes(heads, head_dim, dtype):
    q, k, v = qkv(2, *heads, 130, 170, head_dim, dtype)
    for mask in (Causal(), Window(60, 2)):
        out, lse = attention(q, k, v, mask, backend="cpu", return_lse=True)
        check(out, lse, q, k, v, mask)


@pytest.mark.parametrize("mask", [Causal(), Window(40, 3)], ids=repr)
def test_softcap_and_sink_logits(mask):
    q, k, v = qkv(1, 4, 2, 700, 650, 64)
    for options in (
        {"softcap": 15.0},
        {"sink_logits": torch.randn(4)},
        {"softcap": 50.0, "sink_logits": torch.randn(4), "scale": 0.5},
    ):
        out, lse = attention(q, k, v, mask, backend="cpu", return_lse=True, **options)
        check(out, lse, q, k, v, mask, **options)


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("lengths", [(150, 150), (40, 150), (1, 77)], ids=str)
def test_masks_without_a_closed_form(name, lengths):
    q, k, v = qkv(1, 2, 1, *lengths, 64)
    out, lse = attention(q, k, v, LISTED[name], backend="cpu", return_lse=True)
    check(out, lse, q, k, v, LISTED[name])


def test_blocks_that_are_not_set_are_not_read():
    mask = strided(LENGTH, block=16, stride=4)
    q, k_pages, v_pages, batch = paged([9, 30, 1], [40, LENGTH, 70], 16, 2, 1, 64)
    out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="cpu", return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, mask)
    # What lies outside the blocks is not even read: NaN there leaves no trace.
    q, k, v = qkv(1, 1, 1, 512, 512, 64)
    block_diagonal = BlockSparse(torch.eye(4, dtype=torch.bool), 128)
    out = attention(q, k, v, block_diagonal, backend="cpu")
    k[:, :, :128] = v[:, :, :128] = float("nan")
    assert torch.equal(attention(q, k, v, block_diagonal, backend="cpu")[:, :, 128:], out[:, :, 128:])


def test_large_logits_do_not_overflow():
    q, k, v = qkv(1, 2, 1, 200, 200, 64)
    out, lse = attention(q * 100, k * 100, v, Causal(), backend="cpu", return_lse=True, scale=1.0)
    check(out, lse, q * 100, k * 100, v, Causal(), scale=1.0)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(9), Window(30, 5)], ids=repr)
def test_ragged_sequences_do_not_see_each_other(mask):
    q_lens, k_lens = [5, 0, 1, 300, 7], [5, 3, 200, 300, 0]
    q = torch.randn(sum(q_lens), 4, 64)
    k, v = torch.randn(2, sum(k_lens), 2, 64)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (q_lens, k_lens))
    out, lse = ragged_attention(q, k, v, cu_q, cu_k, mask, backend="cpu", return_lse=True)
    for b in range(len(q_lens)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if k_lens[b] == 0:
            assert not out[rows].any()
            assert torch.isneginf(lse[rows]).all()
            continue
        dense = (x[None].transpose(1, 2) for x in (q[rows], k[keys], v[keys]))
        check(out[rows].transpose(0, 1)[None], lse[rows].T[None], *dense, mask)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(9), Window(30, 5)], ids=repr)
def test_pages_in_any_order(mask, page_size):
    q, k_pages, v_pages, batch = paged([1, 5, 1, 40, 0, 1], [1, 77, 300, 40, 3, 0], page_size, 4, 2, 64)
    batch.page_table[1] = torch.arange(batch.page_table.shape[1])  # and one sequence whose pages lie in order
    out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="cpu", return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, mask)


def test_consecutive_pages_are_read_in_place():
    k_pages, v_pages = torch.randn(2, 70, 16, 2, 64)
    batch = PagedBatch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([1024], dtype=torch.int32),
        torch.arange(3, 67, dtype=torch.int32)[None],
        1,
        1024,
    )
    with LargestOutput() as seen:
        paged_attention(torch.randn(1, 4, 64), k_pages, v_pages, batch, backend="cpu")
    assert seen.elements < 1024 * 64


class LargestOutput(TorchDispatchMode):
    """Sees every operation below and keeps the size of the largest tensor that one made (views make none)."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(x, torch.Tensor):
                    self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("mask", [Window(256), Causal()], ids=repr)
def test_memory_is_linear_in_the_length(mask):
    """A 32K-token prefill makes no tensor larger than its own query tensor."""
    length = 32768
    q, k, v = qkv(1, 2, 1, length, length, 16, torch.bfloat16)
    with LargestOutput() as seen:
        attention(q, k, v, mask, backend="cpu")
    assert 0 < seen.elements <= length * 2 * 16


def test_write_pages_skips_padding():
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, 8)
    k, v = torch.randn(2, 5, 2, 8)
    write_pages(k, v, k_pages, v_pages, torch.tensor([11, -1, 0, 5, -1]))
    for row, slot in ((0, 11), (2, 0), (3, 5)):
        assert torch.equal(k_pages[slot // 4, slot % 4], k[row])
        assert torch.equal(v_pages[slot // 4, slot % 4], v[row])
    assert k_pages.flatten(0, 1).any(-1).any(-1).sum() == 3
