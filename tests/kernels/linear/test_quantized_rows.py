"""Activations in FP8, and the matrix library's products with them, which a GPU from sm_89 on has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from longreach_kernels.linear import Fp8Channels, dequantize, join_outputs, linear, quantize_fp8
from longreach_kernels.linear.quantize_kernel import Fp8Rows, rows_by_group, rows_by_token
from torch import Tensor


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def back(made: Fp8Rows, rows: int, width: int) -> Tensor:
    """What the numbers stand for."""
    values = made.values.double()[:rows]
    scales = made.scales.double()[:rows]
    return values * (scales if scales.shape[1] == 1 else scales.repeat_interleave(128, 1)[:, :width])


@pytest.mark.parametrize("width", [16, 100, 128, 300, 2048])
@pytest.mark.parametrize("by_group", [False, True])
def test_rows_that_fp8_holds_come_back(device: torch.device, width: int, by_group: bool) -> None:
    """The interpreter loses the carry of a mantissa that rounds up, so these are numbers of e4m3."""
    x = torch.randint(-7, 8, (5, width), device=device) * 2.0 ** torch.randint(0, 4, (5, width), device=device)
    x[:, ::128] = 448
    x = (x * 2.0 ** torch.arange(-6, 4, 2, device=device)[:, None]).half()
    x[4] = 0
    made = rows_by_group(x) if by_group else rows_by_token(x)
    assert made.values.shape == (8, width)
    assert made.values.dtype == torch.float8_e4m3fn
    assert torch.equal(back(made, 5, width), x.double())
    assert not made.values[4:].float().any()


@pytest.mark.gpu
@pytest.mark.parametrize("by_group", [False, True])
def test_rows_are_near(by_group: bool) -> None:
    x = (torch.randn(5, 1000, device="cuda") * torch.logspace(-3, 3, 5, device="cuda")[:, None]).bfloat16()
    made = rows_by_group(x) if by_group else rows_by_token(x)
    greatest = x.double().abs().amax(1, keepdim=True)
    allowed = x.double().abs() / 16 + greatest * 2.0**-10 / 448 * 1.01
    assert ((back(made, 5, 1000) - x.double()).abs() <= allowed).all()


def test_static_scales_and_bounds(device: torch.device) -> None:
    x = torch.tensor([[1.0, -8.0, 0.5, 0.25] * 4], device=device).half()
    made = rows_by_token(x, torch.tensor([0.5], device=device))
    assert back(made, 1, 16)[0, :4].tolist() == [1.0, -8.0, 0.5, 0.25]
    assert (made.scales[:1] == 0.5).all()
    bounded = rows_by_token(x, None, 2.0)
    assert bounded.scales[0, 0].item() == pytest.approx(2.0 / 448)
    assert back(bounded, 1, 16)[0, 1].item() == pytest.approx(-2.0)


@pytest.mark.parametrize("make", [rows_by_token, rows_by_group])
def test_gates_before(device: torch.device, make: Callable[..., Fp8Rows]) -> None:
    """A gate of 16 is 16 to fp16's precision behind either activation."""
    ups = torch.randint(-7, 8, (3, 256), device=device) * 2.0 ** torch.randint(0, 4, (3, 256), device=device)
    ups[:, ::128] = 112
    x = torch.cat([torch.full_like(ups, 16.0), ups], 1).half()
    for activation in ("silu", "gelu_tanh"):
        made = make(x, gated=True, activation=activation)
        assert torch.equal(back(made, 3, 256), 16 * ups.double())


def exact_of_fp8(x: Tensor, weight: Tensor, by_group: bool, static: float | None = None) -> Tensor:
    """The product in fp64 of activations that were rounded to FP8."""
    wide = x.float()
    groups = wide.unflatten(1, (-1, 128)) if by_group else wide[:, None, :]
    scales = groups.abs().amax(-1, keepdim=True) / 448 if static is None else torch.tensor(static, device=x.device)
    values = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scales.double()
    return values.flatten(1) @ weight.T


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="the matrix library's products of FP8")
@pytest.mark.parametrize("around", [{}, {"gated": True}, {"add": True}, {"bias": True}], ids=str)
@pytest.mark.parametrize("kind", ["channels", "static", "blocks"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(33, 256, 512), (257, 1024, 384), (4096, 512, 4096), (77, 4096, 14336)]
)
def test_products_of_fp8(rows: int, outputs: int, inputs: int, kind: str, around: dict[str, bool]) -> None:
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    weight = quantize_fp8(
        torch.randn(outputs, inputs, device="cuda") * 0.02, "blocks" if kind == "blocks" else "channels"
    )
    if kind == "static":
        assert isinstance(weight, Fp8Channels)
        weight = replace(weight, input_scale=torch.tensor(0.01, device="cuda"))
    exact = exact_of_fp8(x, dequantize(weight, torch.float64), kind == "blocks", 0.01 if kind == "static" else None)
    bias = torch.randn(outputs, device="cuda").bfloat16() if around.get("bias") else None
    stream = torch.randn(rows, outputs, device="cuda").bfloat16() if around.get("add") else None
    out = linear(x, weight, bias, gated=around.get("gated", False), add_to=None if stream is None else stream.clone())
    if bias is not None:
        exact = exact + bias.double()
    if stream is not None:
        exact = exact + stream.double()
    if around.get("gated"):
        gates, ups = exact.chunk(2, 1)
        exact = torch.nn.functional.silu(gates) * ups
    # Fast accumulation keeps 14 bits; results are rounded to bf16, before and after what follows the product.
    error = (out.double() - exact).abs().max().item()
    assert error <= exact.abs().max().item() * 2.0**-6, (error, exact.abs().max().item())
    relative = (out.double() - exact).norm() / exact.norm()
    assert relative <= 2.0**-7, relative


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="the matrix library's products of FP8")
def test_joined_blocks_of_fewer_outputs_and_scales_that_are_padded() -> None:
    parts = [quantize_fp8(torch.randn(192, 640, device="cuda"), "blocks") for _ in range(2)]
    x = torch.randn(100, 640, device="cuda").bfloat16()
    for weight in (parts[0], join_outputs(parts)):
        exact = x.double() @ dequantize(weight, torch.float64).T
        relative = (linear(x, weight).double() - exact).norm() / exact.norm()
        assert relative <= 0.05, relative


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="the matrix library's products of FP8")
@pytest.mark.parametrize("kind", ["channels", "blocks"])
def test_gates_before_products_of_fp8(kind: str) -> None:
    weight = quantize_fp8(torch.randn(256, 512, device="cuda"), kind)
    x = torch.randn(100, 1024, device="cuda").bfloat16()
    gates, ups = x.chunk(2, 1)
    wanted = linear(torch.nn.functional.silu(gates) * ups, weight).double()
    out = linear(x, weight, gated_input=True).double()
    assert (out - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="the matrix library's products of FP8")
def test_no_wait_for_the_host() -> None:
    """Every form replays in a CUDA graph."""
    from tests.kernels.linear.weights_for_tests import KINDS, random_weight

    for kind in KINDS:
        weight = random_weight(kind, 256, 512, group=128).to("cuda")
        for rows in (4, 40, 100):
            x = torch.randn(rows, 512, device="cuda").bfloat16()
            linear(x, weight)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = linear(x, weight)
            x.normal_()
            graph.replay()
            assert torch.equal(out, linear(x, weight)), (kind, rows)
