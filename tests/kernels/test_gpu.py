"""What only a GPU shows: the real compiler, CUDA graphs, memory, and the same bits a hundred times."""

from collections.abc import Callable

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
from longreach_kernels.masks.patterns import bigbird
from longreach_kernels.ops import attention_op
from torch import Tensor

from tests.kernels.accuracy import paged, qkv

pytestmark = pytest.mark.gpu

BACKENDS = ["triton", "auto"]
BLOCKS = bigbird(2000, block=128, heads=8, random_blocks=3, seed=5, causal=True)


def leaves(*shape: int, head_dim: int = 128) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in qkv(*shape, head_dim, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [Causal(), Window(300, 5), BLOCKS], ids=repr)
def test_inductor_compiles_it_without_a_graph_break(mask: Mask, backend: str) -> None:
    inputs = leaves(1, 8, 2, 2000, 2000)
    starts = torch.tensor([0, 500, 513, 2000], dtype=torch.int32, device="cuda")

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, mask, backend=backend).float().sin()

    def ragged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q * 2, k, v))
        return ragged_attention(q, k, v, starts, starts, mask, backend=backend).float().sin()

    for model in (dense, ragged):
        compiled = torch.compile(model, fullgraph=True)
        out, expected = compiled(*inputs), model(*inputs)
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
        weights = torch.randn_like(expected)
        got, want = (torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))
        for grad, other in zip(got, want, strict=True):
            torch.testing.assert_close(grad, other, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("key", ["causal", "window 300 5"])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["dense", "ragged"])
def test_the_operator_keeps_its_contract(is_ragged: bool, key: str, backend: str) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    q, k, v = leaves(1, 4, 2, 700, 700)
    starts = None
    if is_ragged:
        q, k, v = (x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v))
        starts = torch.tensor([0, 200, 700], dtype=torch.int32, device="cuda")
    torch.library.opcheck(attention_op, (q, k, v, None, starts, starts, key, 0.1, None, backend))


def step(backend: str, page_size: int = 128) -> tuple[Callable[[], Tensor], PagedBatch]:
    """A step that writes keys and attends to them: decodes and chunks of prompts."""
    q, k_pages, v_pages, batch = paged(
        [1, 1, 300, 129], [513, 2000, 300, 1700], page_size, 8, 2, 128, torch.bfloat16, "cuda", num_decodes=2
    )
    new = torch.randn(2, 2, 128, device="cuda").bfloat16()
    slots = torch.tensor([3, -1], device="cuda")

    def run() -> Tensor:
        write_pages(new, new, k_pages, v_pages, slots, backend=backend)
        return paged_attention(q, k_pages, v_pages, batch, backend=backend)

    return run, batch


@pytest.mark.parametrize("backend", BACKENDS)
def test_debug_mode_checks_what_lies_on_the_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, batch = step(backend)
    expected = run()
    monkeypatch.setattr(debug, "ENABLED", True)
    assert torch.equal(run(), expected)
    page = int(batch.page_table[3, 1])
    batch.page_table[3, 1] = 10**6
    with pytest.raises(ValueError, match=r"^page_table: page 1 of sequence 3 must lie between 0 and \d+, got 1000000$"):
        run()
    batch.page_table[3, 1] = page
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_debug_mode_refuses_a_capture_in_words(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, batch = step(backend)
    expected = run()
    monkeypatch.setattr(debug, "ENABLED", True)
    with pytest.raises(ValueError, match=r"^LONGREACH_DEBUG: .*without CUDA graphs"), captured():
        run()
    with pytest.raises(ValueError, match=r"^LONGREACH_DEBUG: .*without CUDA graphs"), captured():
        debug.check_batch(batch, 431, 1000, 128)
    assert torch.equal(run(), expected)  # nothing else is disturbed


def captured() -> torch.cuda.graph:
    return torch.cuda.graph(torch.cuda.CUDAGraph())


def test_tile_lists_of_pages_refuse_a_capture_in_words() -> None:
    q, k_pages, v_pages, batch = paged([1, 70], [900, 2000], 128, 8, 2, 128, torch.bfloat16, "cuda")
    with pytest.raises(ValueError, match=r"^mask: .*CUDA graph"), captured():
        paged_attention(q, k_pages, v_pages, batch, BLOCKS, backend="triton")
    assert torch.isfinite(paged_attention(q, k_pages, v_pages, batch, BLOCKS, backend="triton")).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_linear_in_the_length_up_to_128k(backend: str) -> None:
    """Forward and backward in one go, D=128, 32 query and 8 key heads, causal."""

    def extra(length: int) -> int:
        inputs = leaves(1, 32, 8, length, length)
        grad = torch.ones_like(inputs[0])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(attention(*inputs, backend=backend), inputs, grad)
        torch.cuda.synchronize()
        assert all(torch.isfinite(x[..., -1, :]).all() for x in grads)
        return torch.cuda.max_memory_allocated() - before

    extra(1024)  # what is made once
    short, middle, long = (extra(n * 1024) for n in (32, 64, 128))
    assert 1.9 < middle / short < 2.1
    assert 1.9 < long / middle < 2.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [Causal(), Window(700, 3), BLOCKS], ids=repr)
def test_a_hundred_runs_forward_and_backward_give_the_same_bits(mask: Mask, backend: str) -> None:
    inputs = leaves(1, 8, 2, 2000, 2000)
    grad = torch.randn_like(inputs[0])

    def run() -> tuple[Tensor, ...]:
        out = attention(*inputs, mask, backend=backend)
        return out, *torch.autograd.grad(out, inputs, grad)

    first = run()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("mask", [Causal(), BLOCKS], ids=repr)
def test_a_hundred_steps_over_pages_give_the_same_bits(mask: Mask, page_size: int, backend: str) -> None:
    q, k_pages, v_pages, batch = paged(
        [1, 1, 300, 129], [513, 2000, 300, 1700], page_size, 8, 2, 128, torch.bfloat16, "cuda", num_decodes=2
    )
    first = paged_attention(q, k_pages, v_pages, batch, mask, backend=backend)
    for _ in range(100):
        assert torch.equal(paged_attention(q, k_pages, v_pages, batch, mask, backend=backend), first)
