import subprocess
import sys

import longreach_kernels
import pytest
import torch
from longreach_kernels import (
    BlockSparse,
    Causal,
    PagedBatch,
    Window,
    attention,
    paged_attention,
    ragged_attention,
    resolve_backend,
    write_pages,
)
from longreach_kernels.masks.patterns import bigbird

from tests.kernels.accuracy import paged, qkv


def test_the_exports_are_pinned():
    assert longreach_kernels.__all__ == [
        "Backend",
        "BlockSparse",
        "Causal",
        "DecodeNeeds",
        "Full",
        "Mask",
        "PagedBatch",
        "TileLists",
        "Window",
        "attention",
        "decode_needs",
        "list_tiles",
        "paged_attention",
        "ragged_attention",
        "resolve_backend",
        "rotate",
        "write_pages",
    ]
    assert all(hasattr(longreach_kernels, name) for name in longreach_kernels.__all__)


def test_auto_says_what_it_chose_and_why():
    chosen = resolve_backend("auto", "cpu", torch.bfloat16)
    assert chosen.name == "cpu"
    assert "CPU" in chosen.reason
    assert resolve_backend("auto", "cpu", torch.bfloat16) is chosen


def test_explicit_backends_never_fall_back():
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        resolve_backend("cuda", "cpu")
    with pytest.raises(ValueError, match="tensors on the CPU"):
        resolve_backend("cpu", "cuda")
    with pytest.raises(ValueError, match="no kernels for device 'meta'"):
        resolve_backend("auto", "meta")
    with pytest.raises(ValueError, match="fp16, bf16 or fp32"):
        resolve_backend("triton", "cpu", torch.float64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_the_interpreter_refuses_bf16():
    with pytest.raises(ValueError, match="bf16"):
        resolve_backend("triton", "cpu", torch.bfloat16)


def test_backends_agree():
    q, k, v = qkv(1, 4, 2, 40, 60, 64)
    out, lse = attention(q, k, v, Window(20), backend="reference", return_lse=True)
    for backend in ("cpu", "triton") if not torch.cuda.is_available() else ("cpu",):
        other, other_lse = attention(q, k, v, Window(20), backend=backend, return_lse=True)
        torch.testing.assert_close(other, out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(other_lse, lse, atol=1e-5, rtol=1e-5)


def test_without_lse_only_the_output_comes_back():
    q, k, v = qkv(1, 2, 1, 4, 4, 16)
    assert torch.equal(attention(q, k, v), attention(q, k, v, return_lse=True)[0])


Q, K, V = qkv(1, 4, 2, 8, 8, 64)


@pytest.mark.parametrize(
    ("args", "options", "named"),
    [
        ((Q[0], K, V), {}, "q"),
        ((Q, K[0], V), {}, "k"),
        ((Q, K, V[:, :, :4]), {}, "v"),
        ((Q, K.double(), V), {}, "k"),
        ((Q, K, V.bfloat16()), {}, "v"),
        ((Q.long(), K.long(), V.long()), {}, "q"),
        ((Q[..., :32], K, V), {}, "k"),
        ((Q[:, :3], K, V), {}, "k"),
        ((Q.expand(2, -1, -1, -1), K, V), {}, "k"),
        ((Q.mT.contiguous().mT, K, V), {}, "q"),
        ((Q, K.mT.contiguous().mT, V), {}, "k"),
        ((Q.repeat(1, 1, 1, 9), K.repeat(1, 1, 1, 9), V.repeat(1, 1, 1, 9)), {}, "q"),
        ((Q, K.to("meta"), V), {}, "k"),
        ((Q, K, V, "causal"), {}, "mask"),
        ((Q, K, V), {"scale": 0.0}, "scale"),
        ((Q, K, V), {"scale": float("nan")}, "scale"),
        ((Q, K, V), {"softcap": -1.0}, "softcap"),
        ((Q, K, V), {"sink_logits": torch.zeros(3)}, "sink_logits"),
        ((Q, K, V), {"backend": "flash"}, "backend"),
    ],
)
def test_bad_input_names_its_argument(args, options, named):
    with pytest.raises(ValueError, match=rf"^{named}: "):
        attention(*args, **options)


RAGGED = tuple(x[0].transpose(0, 1) for x in (Q, K, V))
STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        ({"q": RAGGED[0][:, :3]}, {}, "k"),
        ({"k": RAGGED[1][:, :1]}, {}, "v"),
        ({"q": Q}, {}, "q"),
        ({"k": K}, {}, "k"),
        ({"q": RAGGED[0].half()}, {}, "k"),
        ({"v": RAGGED[2].half()}, {}, "v"),
        ({"q": RAGGED[0][..., :32]}, {}, "k"),
        ({}, {"mask": None}, "mask"),
        ({}, {"mask": BlockSparse(torch.ones(3, 1, 1, dtype=torch.bool), 16)}, "mask"),
        ({}, {"softcap": 0.0}, "softcap"),
        ({}, {"scale": -1.0}, "scale"),
        ({}, {"sink_logits": torch.zeros(2)}, "sink_logits"),
        ({}, {"backend": "cuda"}, "backend"),
    ],
)
def test_bad_ragged_tensors_name_their_argument(change, options, named):
    tensors = dict(zip(("q", "k", "v"), RAGGED, strict=True)) | change
    with pytest.raises(ValueError, match=rf"^{named}: "):
        ragged_attention(**tensors, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, **options)


PAGES = paged([1, 5], [20, 33], 8, 4, 2, 64)


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        ({"q": PAGES[0][:, :3]}, {}, "k_pages"),
        ({"v_pages": PAGES[2][:, :, :1]}, {}, "v_pages"),
        ({"q": PAGES[0].half()}, {}, "k_pages"),
        ({"v_pages": PAGES[2].half()}, {}, "v_pages"),
        ({"q": PAGES[0][..., :32]}, {}, "k_pages"),
        ({}, {"mask": "causal"}, "mask"),
        ({}, {"mask": BlockSparse(torch.ones(3, 4, 4, dtype=torch.bool), 16)}, "mask"),
        ({}, {"softcap": float("inf")}, "softcap"),
        ({}, {"scale": 0.0}, "scale"),
        ({}, {"sink_logits": torch.zeros(3)}, "sink_logits"),
        ({}, {"k_scale": torch.ones(2)}, "k_scale"),
        ({}, {"backend": "flash"}, "backend"),
    ],
)
def test_bad_paged_tensors_name_their_argument(change, options, named):
    tensors = dict(zip(("q", "k_pages", "v_pages", "batch"), PAGES, strict=True)) | change
    with pytest.raises(ValueError, match=rf"^{named}: "):
        paged_attention(**tensors, **options)


@pytest.mark.parametrize("backend", ["cpu", "reference", "triton"])
def test_query_heads_share_the_heads_of_a_mask_in_runs(backend):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is tested where there is no GPU")
    mask = bigbird(70, block=16, heads=2, window=0, random_blocks=1, seed=3)
    assert isinstance(mask, BlockSparse)
    alike = BlockSparse(mask.layout.repeat_interleave(2, 0), 16)
    assert not torch.equal(mask.layout[0], mask.layout[1])
    q, k, v = (x.requires_grad_() for x in qkv(1, 4, 1, 50, 70, 64))
    (out, grads), (expected, wanted) = (
        (out, torch.autograd.grad(out.sum(), (q, k, v)))
        for out in (attention(q, k, v, m, backend=backend) for m in (mask, alike))
    )
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
    q_pages, k_pages, v_pages, batch = paged([1, 20], [33, 70], 16, 4, 1, 64)
    out, expected = (paged_attention(q_pages, k_pages, v_pages, batch, m, backend=backend) for m in (mask, alike))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ["cpu", "reference", "triton"])
def test_a_layout_that_is_too_small_is_named_in_every_form(backend):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is tested where there is no GPU")
    q, k_pages, v_pages, batch = PAGES
    for mask in (BlockSparse(torch.ones(1, 1, dtype=torch.bool), 16), bigbird(32, block=16, causal=True)):
        long = qkv(1, 4, 2, 33, 33, 64)
        ragged = (x[0].transpose(0, 1) for x in long)
        starts = torch.tensor([0, 0, 33], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"^layout: .*more blocks"):
            attention(*long, mask, backend=backend)
        with pytest.raises(ValueError, match=r"^layout: .*more blocks"):
            ragged_attention(*ragged, starts, starts, mask, backend=backend)
        with pytest.raises(ValueError, match=r"^layout: .*more blocks"):
            paged_attention(q, k_pages, v_pages, batch, mask, backend=backend)


def test_bad_ragged_input_names_its_argument():
    q, k, v = Q[0].transpose(0, 1), K[0].transpose(0, 1), V[0].transpose(0, 1)
    good = torch.tensor([0, 8], dtype=torch.int32)
    for named, cu_q, cu_k in (
        ("cu_seqlens_q", good.long(), good),
        ("cu_seqlens_k", good, good[None]),
        ("cu_seqlens_k", good, torch.tensor([0, 4, 8], dtype=torch.int32)),
        ("cu_seqlens_q", good.to("meta"), good),
    ):
        with pytest.raises(ValueError, match=rf"^{named}: "):
            ragged_attention(q, k, v, cu_q, cu_k)


def test_a_batch_checks_itself():
    cu, lens, table = (torch.zeros(s, dtype=torch.int32) for s in (3, 2, (2, 4)))
    PagedBatch(cu, lens, table, 1, 64)
    for named, change in (
        ("cu_seqlens_q", {"cu_seqlens_q": cu[:2]}),
        ("cu_seqlens_q", {"cu_seqlens_q": cu.long()}),
        ("context_lens", {"context_lens": lens[None]}),
        ("page_table", {"page_table": table[:1]}),
        ("page_table", {"page_table": table.T}),
        ("max_seqlen_q", {"max_seqlen_q": 0}),
        ("max_context_len", {"max_context_len": -1}),
        ("num_decodes", {"num_decodes": 3}),
    ):
        fields = {"cu_seqlens_q": cu, "context_lens": lens, "page_table": table}
        fields |= {"max_seqlen_q": 1, "max_context_len": 64} | change
        with pytest.raises(ValueError, match=rf"^{named}: "):
            PagedBatch(**fields)


def test_bad_paged_input_names_its_argument():
    q, k_pages, v_pages, batch = paged([3], [20], 8, 4, 2, 64)
    for named, args in (
        ("q", (q[None], k_pages, v_pages, batch)),
        ("k_pages", (q, k_pages[0], v_pages[0], batch)),
        ("v_pages", (q, k_pages, v_pages[:2], batch)),
        ("k_pages", (q, k_pages.double(), v_pages.double(), batch)),
        ("k_pages", (q, k_pages.transpose(0, 1), v_pages.transpose(0, 1), batch)),
        ("batch", (q, k_pages[:, :2].contiguous(), v_pages[:, :2].contiguous(), batch)),
    ):
        with pytest.raises(ValueError, match=rf"^{named}: "):
            paged_attention(*args, Causal())


def test_bad_writes_name_their_argument():
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, 8)
    k, v = torch.zeros(2, 5, 2, 8)
    slots = torch.zeros(5, dtype=torch.int64)
    for named, args in (
        ("k", (k[:, :1], v, k_pages, v_pages, slots)),
        ("v", (k, v[:4], k_pages, v_pages, slots)),
        ("k_pages", (k, v, k_pages.mT, v_pages, slots)),
        ("slots", (k, v, k_pages, v_pages, slots.int())),
        ("slots", (k, v, k_pages, v_pages, slots[:3])),
    ):
        with pytest.raises(ValueError, match=rf"^{named}: "):
            write_pages(*args)


def test_an_import_does_not_load_torchs_compiler() -> None:
    """It takes longer than all the rest, and a server that starts has no use for it."""
    command = "import sys, longreach_kernels; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False, timeout=300).returncode == 0
