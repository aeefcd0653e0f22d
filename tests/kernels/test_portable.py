"""The plain Triton kernels: in the interpreter where there is no GPU, on it where there is one."""

import pytest
import torch
from longreach_kernels import (
    Causal,
    Full,
    PagedBatch,
    Window,
    attention,
    paged_attention,
    ragged_attention,
    write_pages,
)
from longreach_kernels.backends.triton import decode_launch
from longreach_kernels.masks.patterns import bigbird

from tests.kernels.accuracy import check, check_paged, paged, qkv
from tests.kernels.patterns_for_tests import LISTED
from tests.pairwise import thinned

MASKS = [Full(), Causal(), Window(1), Window(40), Window(20, 3), Window(10, 40)]


def low_precision(device: torch.device) -> torch.dtype:
    """The interpreter does not multiply bf16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


LENGTHS = [(1, 1), (70, 1), (40, 3), (63, 64), (70, 70), (20, 65), (1, 91), (33, 97)]


@pytest.mark.parametrize(("lengths", "mask"), thinned(LENGTHS, MASKS, count=8, strength=1), ids=str)
def test_lengths_and_masks(lengths, mask, device):
    q, k, v = qkv(1, 2, 1, *lengths, 64, device=device)
    out, lse = attention(q, k, v, mask, backend="triton", return_lse=True)
    check(out, lse, q, k, v, mask)


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "low"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 192, 256])
def test_head_dims_and_dtypes(head_dim, low, device):
    q, k, v = qkv(1, 2, 1, 35, 45, head_dim, low_precision(device) if low else torch.float32, device)
    out, lse = attention(q, k, v, Causal(), backend="triton", return_lse=True)
    check(out, lse, q, k, v, Causal())


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (3, 1)])
def test_grouped_heads_and_strides(heads, device):
    # Token-major storage, as a model's projections leave it.
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in qkv(2, *heads, 40, 40, 64, low_precision(device), device)
    )
    out, lse = attention(q, k, v, Causal(), backend="triton", return_lse=True)
    check(out, lse, q, k, v, Causal())


@pytest.mark.parametrize("mask", [Causal(), Window(20, 3)], ids=repr)
def test_softcap_and_sink_logits(mask, device):
    q, k, v = qkv(1, 2, 2, 40, 70, 64, device=device)
    sinks = torch.randn(2, device=device)
    for options in ({"softcap": 15.0}, {"sink_logits": sinks}, {"softcap": 50.0, "sink_logits": sinks, "scale": 0.5}):
        out, lse = attention(q, k, v, mask, backend="triton", return_lse=True, **options)
        check(out, lse, q, k, v, mask, **options)


def test_large_logits_do_not_overflow(device):
    q, k, v = qkv(1, 1, 1, 40, 40, 64, device=device)
    out, lse = attention(q * 100, k * 100, v, Causal(), backend="triton", return_lse=True, scale=1.0)
    check(out, lse, q * 100, k * 100, v, Causal(), scale=1.0)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(9, 2)], ids=repr)
def test_ragged_sequences_do_not_see_each_other(mask, device):
    q_lens, k_lens = [5, 0, 1, 70, 0, 7], [5, 3, 100, 70, 0, 0]
    q = torch.randn(sum(q_lens), 2, 64, device=device)
    k, v = torch.randn(2, sum(k_lens), 1, 64, device=device)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int().to(device) for x in (q_lens, k_lens))
    out, lse = ragged_attention(q, k, v, cu_q, cu_k, mask, backend="triton", return_lse=True)
    for b in range(len(q_lens)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if k_lens[b] == 0:
            assert not out[rows].any()
            assert torch.isneginf(lse[rows]).all()
            continue
        dense = (x[None].transpose(1, 2) for x in (q[rows], k[keys], v[keys]))
        check(out[rows].transpose(0, 1)[None], lse[rows].T[None], *dense, mask)


@pytest.mark.parametrize(
    ("page_size", "mask"),
    thinned([1, 4, 16, 64, 128], [Causal(), Window(9), Window(30, 5)], count=3, strength=1),
    ids=str,
)
def test_paged_prefill(mask, page_size, device):
    q, k_pages, v_pages, batch = paged([5, 40, 0, 2], [77, 40, 3, 0], page_size, 2, 1, 64, device=device)
    out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="triton", return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, mask)


DECODED = [Full(), Causal(), Window(9), Window(70), Window(30, 5), Window(30, 80)]


@pytest.mark.parametrize(("page_size", "mask"), thinned([1, 16, 128], DECODED, count=3, strength=1), ids=str)
def test_paged_decode(mask, page_size, device, monkeypatch):
    """Contexts on both sides of a split, here of 64 keys, and padding."""
    monkeypatch.setattr(decode_launch, "SPLIT_KEYS", 64)
    contexts = [1, 63, 64, 65, 150, 0]
    q, k_pages, v_pages, batch = paged([1] * 6, contexts, page_size, 4, 2, 64, low_precision(device), device)
    sinks = torch.randn(4, device=device)
    for options in ({}, {"sink_logits": sinks, "softcap": 20.0}):
        out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="triton", return_lse=True, **options)
        check_paged(out, lse, q, k_pages, v_pages, batch, mask, **options)


def test_more_splits_than_one_block_of_the_merge(device, monkeypatch):
    """18 splits where 16 merge at a time, with the largest logits last, so that the first block must be scaled down."""
    monkeypatch.setattr(decode_launch, "SPLIT_KEYS", 64)
    q, k_pages, v_pages, batch = paged([1], [1100], 64, 2, 1, 64, device=device)
    for place, page in enumerate(batch.page_table[0, :18].tolist()):
        k_pages[page] *= 0.2 + place / 9
    out, lse = paged_attention(q, k_pages, v_pages, batch, backend="triton", return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, Causal())


@pytest.mark.parametrize("num_decodes", [0, 1, 3])
def test_a_step_mixes_decodes_and_prefill_chunks(num_decodes, device):
    q, k_pages, v_pages, batch = paged(
        [1, 1, 1, 33, 1, 4], [520, 40, 1, 33, 70, 99], 16, 4, 1, 64, device=device, num_decodes=num_decodes
    )
    out, lse = paged_attention(q, k_pages, v_pages, batch, Causal(), backend="triton", return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, Causal())


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(device):
    contexts = [700, 90, 520]
    q, k_pages, v_pages, batch = paged([1, 1, 1], contexts, 16, 4, 2, 64, low_precision(device), device)
    together = paged_attention(q, k_pages, v_pages, batch, backend="triton")
    for b, context in enumerate(contexts):
        alone = PagedBatch(
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            batch.context_lens[b : b + 1].clone(),
            batch.page_table[b : b + 1].clone(),
            max_seqlen_q=1,
            max_context_len=context,
        )
        assert torch.equal(paged_attention(q[b : b + 1], k_pages, v_pages, alone, backend="triton")[0], together[b])


@pytest.mark.gpu  # the interpreter's matrix product is numpy's, whose rows depend on their place
@pytest.mark.parametrize("mask", [Causal(), Window(370, 5)], ids=repr)
def test_a_prompt_gets_the_same_bits_however_it_is_chunked(mask):
    q, k, v = qkv(1, 2, 1, 1500, 1500, 128, torch.bfloat16, "cuda")
    whole = attention(q, k, v, mask, backend="triton")
    start = 0
    for end in (370, 1011, 1500):
        part = attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], mask, backend="triton")
        assert torch.equal(part, whole[:, :, start:end])
        start = end


@pytest.mark.parametrize(
    ("name", "lengths"), thinned(LISTED, [(150, 150), (40, 150), (1, 77)], count=3, strength=1), ids=str
)
def test_tile_lists(name, lengths, device):
    mask = LISTED[name]
    q, k, v = qkv(2 if lengths[0] == 40 else 1, 2, 1, *lengths, 64, device=device)
    out, lse = attention(q, k, v, mask, backend="triton", return_lse=True)
    check(out, lse, q, k, v, mask)


@pytest.mark.parametrize("name", LISTED)
def test_tile_lists_of_ragged_sequences(name, device):
    """Chunks of a prompt, a sequence alone, one without queries and one without keys."""
    mask, q_lens, k_lens = LISTED[name], [40, 70, 0, 1, 33, 5], [150, 70, 20, 77, 65, 0]
    parts = [qkv(1, 4, 2, n, m, 64, device=device) for n, m in zip(q_lens, k_lens, strict=True)]
    q, k, v = (torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(3))
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int().to(device) for x in (q_lens, k_lens))
    mask = mask if mask.heads == 1 else bigbird(150, block=16, heads=4, random_blocks=1, seed=1, causal=True)
    out, lse = ragged_attention(q, k, v, cu_q, cu_k, mask, backend="triton", return_lse=True)
    for part, out_b, lse_b in zip(parts, out.split(q_lens), lse.split(q_lens), strict=True):
        check(out_b.transpose(0, 1)[None], lse_b.T[None], *part, mask)


@pytest.mark.parametrize(
    ("name", "page_size"), [*thinned(LISTED, [16, 128], count=3, strength=1), ("union", 32), ("bigbird", 64)]
)
def test_tile_lists_of_paged_sequences(name, page_size, device):
    """Decodes, a whole prompt, chunks of prompts and padding."""
    mask = LISTED[name]
    q, k_pages, v_pages, batch = paged(
        [1, 1, 70, 33, 5, 2], [150, 33, 70, 97, 150, 0], page_size, 2, 1, 64, device=device, num_decodes=2
    )
    options = {"sink_logits": torch.randn(2, device=device), "softcap": 20.0} if page_size == 128 else {}
    out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="triton", return_lse=True, **options)
    check_paged(out, lse, q, k_pages, v_pages, batch, mask, **options)


def test_write_pages_skips_padding(device):
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, 24, device=device)
    k, v = torch.randn(2, 5, 2, 24, device=device)
    write_pages(k, v, k_pages, v_pages, torch.tensor([11, -1, 0, 5, -1], device=device), backend="triton")
    for row, slot in ((0, 11), (2, 0), (3, 5)):
        assert torch.equal(k_pages[slot // 4, slot % 4], k[row])
        assert torch.equal(v_pages[slot // 4, slot % 4], v[row])
    assert k_pages.flatten(0, 1).any(-1).any(-1).sum() == 3


# Larger shapes, where the GPU's tiles have interiors.

GPU_LENGTHS = [(1, 1), (239, 1), (799, 3), (1023, 1024), (4224, 4224), (108, 256), (1, 8191), (127, 4097)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "mask", "head_dim"),
    thinned(
        GPU_LENGTHS,
        [Full(), Causal(), Window(1), Window(1000), Window(9000), Window(300, 500)],
        [64, 80, 96, 128, 192, 256],
        count=24,
    ),
    ids=str,
)
def test_gpu_lengths(lengths, mask, head_dim):
    q, k, v = qkv(1, 4, 2, *lengths, head_dim, torch.bfloat16, "cuda")
    out, lse = attention(q, k, v, mask, backend="triton", return_lse=True)
    check(out, lse, q, k, v, mask)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page_size", "mask"),
    thinned([1, 4, 16, 64, 128, 256], [Causal(), Window(700), Window(300, 500)], count=3, strength=1),
    ids=str,
)
def test_gpu_pages(mask, page_size):
    q, k_pages, v_pages, batch = paged(
        [1, 1, 1, 1000, 1, 513, 3000, 0, 1],
        [1, 4000, 513, 3000, 900, 2049, 3000, 5, 0],
        page_size,
        8,
        2,
        128,
        torch.bfloat16,
        "cuda",
        num_decodes=3,
    )
    out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="triton", return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gpu_block_sparse(block, head_dim):
    mask = bigbird(3000, block=block, heads=4, random_blocks=5, causal=True)
    q, k, v = qkv(2, 4, 2, 3000, 3000, head_dim, torch.bfloat16, "cuda")
    out, lse = attention(q, k, v, mask, backend="triton", return_lse=True)
    check(out, lse, q, k, v, mask)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page_size", "head_dim", "block"), thinned([16, 32, 64, 128], [64, 128, 256], [16, 64, 128], count=4)
)
def test_gpu_tile_lists_of_pages(page_size, head_dim, block):
    mask = bigbird(3000, block=block, heads=8, random_blocks=5, causal=True)
    q_lens, contexts = [1, 1, 1000, 513, 3000, 2], [3000, 513, 1000, 2049, 3000, 0]
    q, k_pages, v_pages, batch = paged(
        q_lens, contexts, page_size, 8, 2, head_dim, torch.bfloat16, "cuda", num_decodes=2
    )
    out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="triton", return_lse=True)
    check_paged(out, lse, q, k_pages, v_pages, batch, mask)


@pytest.mark.gpu
def test_a_captured_decode_follows_the_lengths_on_the_device():
    q, k_pages, v_pages, batch = paged([1] * 4, [4000, 700, 1, 0], 16, 8, 2, 128, torch.bfloat16, "cuda")
    slots = torch.tensor([3, -1, 40, 41], device="cuda")
    k_new, v_new = torch.randn(2, 4, 2, 128, device="cuda").bfloat16()

    def step():
        write_pages(k_new, v_new, k_pages, v_pages, slots)
        return paged_attention(q, k_pages, v_pages, batch, backend="triton", return_lse=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for lengths in ([4000, 700, 1, 0], [1, 2, 3, 4], [0, 3999, 512, 513]):
        batch.context_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        check_paged(out, lse, q, k_pages, v_pages, batch, Causal())
