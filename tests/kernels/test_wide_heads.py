"""Head dim 512, as the global layers of Gemma 4 have it: tiles of its own in every portable kernel."""

import pytest
import torch
from longreach_kernels import (
    Causal,
    Mask,
    PagedBatch,
    Window,
    attention,
    debug,
    paged_attention,
    ragged_attention,
    write_pages,
)
from longreach_kernels.backends.hopper import decode_launch as hopper_decode
from longreach_kernels.backends.hopper import forward_launch as hopper_forward
from longreach_kernels.backends.triton import decode_launch
from longreach_kernels.masks.listed_mask import listed_masks
from longreach_kernels.masks.patterns import bigbird
from longreach_kernels.sparse import Antidiagonal, Moments, Pooled, Recall, select_tiles
from longreach_kernels.sparse.decode.attend import block_attention, select_blocks
from longreach_kernels.sparse.decode.bounds import new_bounds, write_bounds
from torch import Tensor

from tests.kernels.accuracy import check, check_fp8, check_paged, paged, qkv

WIDE = 512
MASKS = [Causal(), Window(20), Window(12, 5)]


def low_precision(device: torch.device) -> torch.dtype:
    """The interpreter does not multiply bf16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def keys_of(pages: Tensor, batch: PagedBatch, sequence: int) -> Tensor:
    """The rows of one sequence, (keys, Hkv, D)."""
    length = int(batch.context_lens[sequence])
    return pages[batch.page_table[sequence].long()].flatten(0, 1)[:length]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("backend", ["triton", "cpu", "reference"])
def test_dense_and_ragged(backend: str, mask: Mask, device: torch.device) -> None:
    if device.type == "cuda" and backend == "cpu":
        pytest.skip("the CPU's backend is tested on the CPU")
    q, k, v = qkv(1, 4, 2, 35, 45, WIDE, device=device)
    out, lse = attention(q, k, v, mask, backend=backend, return_lse=True)
    check(out, lse, q, k, v, mask)
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    starts_q, starts_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (35, 45))
    out, lse = ragged_attention(*rows, starts_q, starts_k, mask, backend=backend, return_lse=True)
    check(out.transpose(0, 1)[None], lse.T[None], q, k, v, mask)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("backend", ["triton", "cpu"])
def test_prefill_and_decode_over_pages(
    backend: str, mask: Mask, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of 4, decodes over several splits, a chunk and a whole prompt."""
    if device.type == "cuda" and backend == "cpu":
        pytest.skip("the CPU's backend is tested on the CPU")
    monkeypatch.setattr(decode_launch, "SPLIT_KEYS", 32)
    lengths = [1, 1, 9, 40], [100, 33, 60, 40]
    dtype = low_precision(device) if backend == "triton" else torch.float32
    q, k_pages, v_pages, batch = paged(*lengths, 16, 8, 2, WIDE, dtype, device, num_decodes=2)
    sinks = torch.randn(8, device=device)
    for options in ({}, {"softcap": 20.0, "sink_logits": sinks, "scale": 0.1}):
        out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend=backend, return_lse=True, **options)
        check_paged(out, lse, q, k_pages, v_pages, batch, mask, **options)


@pytest.mark.parametrize("backend", ["triton", "cpu"])
def test_pages_in_fp8(backend: str, device: torch.device) -> None:
    if device.type == "cuda" and backend == "cpu":
        pytest.skip("the CPU's backend is tested on the CPU")
    dtype = low_precision(device) if device.type == "cuda" else torch.float32
    q, k_pages, v_pages, batch = paged([1, 9], [70, 40], 16, 4, 2, WIDE, dtype, device, num_decodes=1)
    check_fp8(q, k_pages, v_pages, batch, Causal(), backend)


def test_writes(device: torch.device) -> None:
    k_pages, v_pages = torch.zeros(2, 3, 16, 4, WIDE, device=device)
    k, v = torch.randn(2, 3, 4, WIDE, device=device)
    write_pages(k, v, k_pages, v_pages, torch.tensor([40, -1, 2], device=device), backend="triton")
    for pages, rows in ((k_pages, k), (v_pages, v)):
        assert torch.equal(pages.flatten(0, 1)[[40, 2]], rows[[0, 2]])
        assert pages.flatten(0, 1).any(-1).any(-1).sum() == 2


def test_a_static_pattern_over_pages(device: torch.device) -> None:
    mask = bigbird(100, block=16, heads=4, random_blocks=1, causal=True)
    q, k_pages, v_pages, batch = paged([1, 40], [70, 100], 16, 4, 2, WIDE, low_precision(device), device, num_decodes=1)
    out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="triton", return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, mask)


@pytest.mark.parametrize("estimator", [Antidiagonal(8), Moments(), Pooled()], ids=str)
def test_tiles_that_an_estimate_chose(estimator: Antidiagonal | Moments | Pooled, device: torch.device) -> None:
    lengths = ([130, 300], [500, 300]) if device.type == "cuda" else ([40, 96], [160, 96])
    q, k_pages, v_pages, batch = paged(*lengths, 128, 4, 2, WIDE, low_precision(device), device)
    near = {"dense_below": 32, "tail": 16, "local": 32}
    lists = select_tiles(q, k_pages, batch, target=Recall(0.5), estimator=estimator, backend="triton", **near)
    debug.check_lists(lists, batch)
    out, lse = paged_attention(q, k_pages, v_pages, batch, lists=lists, backend="triton", return_lse=True)
    starts = batch.cu_seqlens_q.tolist()
    left_out = 0
    for b, meant in enumerate(listed_masks(lists, *lengths)):
        rows = slice(starts[b], starts[b + 1])
        k, v = (keys_of(x, batch, b).cpu().transpose(0, 1)[None] for x in (k_pages, v_pages))
        own = (out[rows].cpu().transpose(0, 1)[None], lse[rows].cpu().T[None])
        check(*own, q[rows].cpu().transpose(0, 1)[None], k, v, meant)
        left_out += int((meant.state == -1).sum())
    assert left_out, "all was read"


def test_decodes_that_read_a_budget(device: torch.device) -> None:
    q, k_pages, v_pages, batch = paged([1, 1], [90, 33], 16, 4, 2, WIDE, device=device, num_decodes=2)
    bounds = new_bounds(k_pages)
    for b, length in enumerate(batch.context_lens.tolist()):
        place = torch.arange(length, device=device)
        slots = batch.page_table[b].long()[place // 16] * 16 + place % 16
        write_bounds(k_pages, bounds, slots, backend="triton")
    choice = select_blocks(q, bounds, batch, budget=48, backend="triton")
    out, lse = block_attention(q, k_pages, v_pages, batch, choice, backend="triton")
    tables = (x.cpu() for x in (batch.cu_seqlens_q, batch.context_lens, batch.page_table))
    own = PagedBatch(*tables, max_seqlen_q=1, max_context_len=90, num_decodes=2)
    expected = select_blocks(q.cpu(), bounds.cpu(), own, budget=48, backend="cpu")
    assert torch.equal(choice.lengths.cpu(), expected.lengths)
    assert torch.equal(choice.blocks.cpu(), expected.blocks)
    want = block_attention(q.cpu(), k_pages.cpu(), v_pages.cpu(), own, expected, backend="cpu")
    for got, exact in zip((out, lse), want, strict=True):
        torch.testing.assert_close(got.cpu(), exact, atol=1e-5, rtol=1e-5)


def test_a_gradient_is_refused_by_name(device: torch.device) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 1, 8, 8, WIDE, device=device))
    with pytest.raises(ValueError, match=r"^q: the backward kernels take head dims to 256, got 512"):
        attention(q, k, v, backend="triton")
    with torch.no_grad():
        attention(q, k, v, backend="triton")
    attention(q, k, v, backend="reference").sum().backward()
    assert q.grad is not None
    assert q.grad.any()


def test_wider_heads_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^q: head dim must lie between 1 and 512, got 513"):
        attention(*qkv(1, 1, 1, 2, 2, 513))


def test_the_hopper_kernels_leave_decodes_to_the_portable_ones() -> None:
    q, k_pages, v_pages, _ = paged([1], [20], 128, 4, 2, WIDE, torch.bfloat16)
    assert hopper_forward.supports(q, k_pages, Causal(), page_size=128)
    assert not hopper_decode.supports(q, k_pages, v_pages, Causal())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("mask", [Causal(), Window(700), Window(300, 500)], ids=repr)
def test_gpu_long_prompts_and_decodes(mask: Mask, backend: str) -> None:
    lengths = [1, 1, 1, 1000, 513, 2000], [1, 3000, 513, 2000, 2049, 2000]
    q, k_pages, v_pages, batch = paged(*lengths, 128, 8, 2, WIDE, torch.bfloat16, "cuda", num_decodes=3)
    out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend=backend, return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, mask)
