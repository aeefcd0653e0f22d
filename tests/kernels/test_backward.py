"""Gradients of both backends against autograd through the fp64 reference."""

import pytest
import torch
from longreach_kernels import (
    Causal,
    Full,
    Mask,
    Window,
    attention,
    paged_attention,
    ragged_attention,
)
from longreach_kernels.backends.protocol import CuSeqlens
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall
from longreach_kernels.ops import attention_op
from torch import Tensor

from tests.kernels.accuracy import eager_low_precision, paged, qkv, tolerance
from tests.kernels.patterns_for_tests import LISTED
from tests.pairwise import thinned

MASKS = [Full(), Causal(), Window(1), Window(40), Window(20, 5), Window(10, 50)]


@pytest.fixture(params=["cpu", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(backend, device)"""
    if request.param == "cuda":
        return "triton", "cuda"
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is tested where there is no GPU")
    return request.param, "cpu"


def gradients(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum over out and lse with fixed random weights; rows without keys have no finite lse and are left out."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(out.shape, generator=generator).to(out.device)
    lse_weights = torch.randn(lse.shape, generator=generator).to(out.device)
    finite = torch.where(torch.isfinite(lse), lse, 0.0)
    return torch.autograd.grad((out * weights).sum() + (finite * lse_weights).sum(), leaves)


def check_gradients(mask: Mask, tensors: list[Tensor], backend: str, **options) -> None:
    leaves = [x.requires_grad_() for x in tensors]
    sinks = {"sink_logits": leaves[3]} if len(leaves) == 4 else {}
    out, lse = attention(*leaves[:3], mask, backend=backend, return_lse=True, **options, **sinks)
    exact_leaves = [x.detach().double().requires_grad_() for x in tensors]
    sinks = {"sink_logits": exact_leaves[3]} if len(leaves) == 4 else {}
    scale = tensors[0].shape[-1] ** -0.5
    exact_out, exact_lse = reference.attention(*exact_leaves[:3], AttentionCall(mask, scale=scale, **options, **sinks))
    for grad, exact in zip(gradients(out, lse, leaves), gradients(exact_out, exact_lse, exact_leaves), strict=True):
        assert (grad.double() - exact).abs().max() <= 2e-5 * max(1.0, exact.abs().max().item())


@pytest.mark.parametrize(
    ("lengths", "mask"), thinned([(70, 70), (1, 50), (40, 90), (50, 20)], MASKS, count=4, strength=1), ids=str
)
def test_lengths_and_masks(lengths, mask, place):
    check_gradients(mask, list(qkv(1, 2, 1, *lengths, 64, device=place[1])), place[0])


@pytest.mark.parametrize("mask", [Causal(), Window(20, 5)], ids=repr)
def test_softcap_and_sink_logits(mask, place):
    sinks = torch.randn(4, device=place[1])
    tensors = [*qkv(1, 4, 2, 40, 70, 64, device=place[1]), sinks]
    check_gradients(mask, tensors, place[0], softcap=5.0)


@pytest.mark.parametrize("head_dim", [24, 128])
def test_head_dims_groups_and_batches(head_dim, place):
    check_gradients(Causal(), list(qkv(2, 4, 2, 35, 45, head_dim, device=place[1])), place[0])


@pytest.mark.parametrize(("name", "num_queries"), thinned(LISTED, [150, 40], count=2, strength=1), ids=str)
def test_tile_lists(name, num_queries, place):
    check_gradients(LISTED[name], list(qkv(1, 2, 1, num_queries, 150, 64, device=place[1])), place[0])


@pytest.mark.parametrize(
    "mask", [Full(), Causal(), Window(9, 2), *(LISTED[n] for n in ("strided", "windows", "empty rows"))], ids=repr
)
def test_ragged_gradients(mask, place):
    backend, device = place
    q_lens, k_lens = [5, 0, 1, 70, 0, 7], [5, 3, 60, 70, 0, 0]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int().to(device) for x in (q_lens, k_lens))
    shapes = ((sum(q_lens), 4), (sum(k_lens), 2), (sum(k_lens), 2))
    leaves = [torch.randn(*s, 64, device=device).requires_grad_() for s in shapes]
    sinks = torch.randn(4, device=device).requires_grad_()
    out, lse = ragged_attention(*leaves, cu_q, cu_k, mask, sink_logits=sinks, backend=backend, return_lse=True)
    exact_leaves = [x.detach().double().requires_grad_() for x in (*leaves, sinks)]
    exact = reference.ragged_attention(
        *exact_leaves[:3], CuSeqlens(cu_q, cu_k), AttentionCall(mask, scale=0.125, sink_logits=exact_leaves[3])
    )
    expected = gradients(*exact, exact_leaves)
    for grad, want in zip(gradients(out, lse, [*leaves, sinks]), expected, strict=True):
        assert (grad.double() - want).abs().max() <= 2e-5 * max(1.0, want.abs().max().item())


def test_gradients_agree_with_finite_differences():
    tensors = [x.requires_grad_() for x in qkv(1, 2, 1, 7, 9, 8, torch.float64)]
    sinks = torch.randn(2, dtype=torch.float64).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, Window(5, 2), softcap=3.0, sink_logits=s, backend="cpu", return_lse=True)

    assert torch.autograd.gradcheck(run, (*tensors, sinks))


def test_only_lse_may_be_used(place):
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 1, 20, 20, 64, device=place[1]))
    _, lse = attention(q, k, v, backend=place[0], return_lse=True)
    (dq,) = torch.autograd.grad(lse.sum(), (q,))
    expected = attention(q, k, k, backend="reference") * 64**-0.5  # d lse / d q is the mean key, scaled
    torch.testing.assert_close(dq, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", [Causal(), Window(9, 2), LISTED["strided"]], ids=repr)
def test_it_compiles_without_a_graph_break(mask, place):
    backend, device = place
    q, k, v = (x.requires_grad_() for x in qkv(1, 4, 2, 50, 50, 64, device=device))

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask, backend=backend).sin()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out, expected = compiled(q, k, v), model(q, k, v)
    torch.testing.assert_close(out, expected)
    got, want = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))
    for grad, other in zip(got, want, strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("ragged", [False, True])
def test_the_operator_keeps_its_contract(ragged, place):
    backend, device = place
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 1, 20, 20, 16, device=device))
    cu = None
    if ragged:
        q, k, v = (x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v))
        cu = torch.tensor([0, 7, 20], dtype=torch.int32, device=device)
    sinks = torch.randn(2, device=device, requires_grad=True)
    torch.library.opcheck(attention_op, (q, k, v, sinks, cu, cu, "window 6 1", 0.25, None, backend))


def test_a_key_outlives_no_mask():
    from longreach_kernels.masks.mask import mask_of

    mask = LISTED["strided"] & Window(9)
    assert mask_of(mask.key) is mask
    key = mask.key
    del mask
    with pytest.raises(ValueError, match=r"^mask: .*deleted"):
        mask_of(key)
    for value in (Full(), Causal(), Window(7, 2)):
        assert mask_of(value.key) == value


def test_paged_attention_refuses_to_be_differentiated():
    q, k_pages, v_pages, batch = paged([3], [20], 8, 4, 2, 64)
    with pytest.raises(ValueError, match=r"^q: .*no gradient"):
        paged_attention(q.requires_grad_(), k_pages, v_pages, batch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "mask", "head_dim"),
    thinned(
        [(1, 1), (799, 3), (1023, 1024), (2112, 2112), (127, 2097)],
        [Full(), Causal(), Window(500, 7)],
        [64, 80, 128, 256],
        count=8,
    ),
    ids=str,
)
def test_gpu_gradients(lengths, mask, head_dim):
    tensors = qkv(1, 4, 2, *lengths, head_dim, torch.bfloat16, "cuda")
    grad = torch.randn_like(tensors[0])
    scale = head_dim**-0.5
    leaves = [x.clone().requires_grad_() for x in tensors]
    grads = torch.autograd.grad(attention(*leaves, mask, backend="triton"), leaves, grad)
    exact_leaves = [x.double().requires_grad_() for x in tensors]
    exact = torch.autograd.grad(
        reference.attention(*exact_leaves, AttentionCall(mask, scale=scale))[0], exact_leaves, grad.double()
    )
    eager_leaves = [x.clone().requires_grad_() for x in tensors]
    eager = torch.autograd.grad(eager_low_precision(*eager_leaves, mask, scale, None, None), eager_leaves, grad)
    for got, want, low in zip(grads, exact, eager, strict=True):
        assert (got.double() - want).abs().max() <= tolerance(want, low, torch.bfloat16)
