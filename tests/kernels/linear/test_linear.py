"""Products with weights of every format, on a CPU, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from longreach_kernels.linear import Fp8Blocks, Int4Groups, Weight, dequantize_kernel, linear, quantize_fp8
from longreach_kernels.linear.rows_kernel import kernel_weight

from tests.kernels.linear.accuracy import check_linear
from tests.kernels.linear.weights_for_tests import KINDS, random_weight

ALL = ("16 bits", *KINDS)
AROUND: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"add": True, "scale": 0.5},
    {"gated": True, "bias": True},
    {"gated": True, "activation": "gelu_tanh", "add": True},
]


def a_weight(kind: str, outputs: int, inputs: int, dtype: torch.dtype, group: int = 32) -> Weight:
    weight = random_weight("fp16" if kind == "16 bits" else kind, outputs, inputs, group=group)
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight


@pytest.mark.parametrize("around", AROUND, ids=str)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_on_a_cpu(backend: str, kind: str, around: dict[str, Any]) -> None:
    for dtype, rows in ((torch.bfloat16, 3), (torch.float32, 40)):
        x = torch.randn(rows, 160).to(dtype)
        check_linear(x, a_weight(kind, 1200, 160, dtype), backend=backend, **around)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("around", AROUND, ids=str)
def test_few_rows(device: torch.device, kind: str, around: dict[str, Any]) -> None:
    dtypes = (torch.float16, torch.float32) if device.type == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
    for dtype in dtypes:
        x = torch.randn(5, 416, device=device).to(dtype)
        check_linear(x, a_weight(kind, 72, 416, dtype).to(device), backend="triton", **around)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"),
    [(1, 1, 32, 32), (1, 40, 128, 128), (17, 24, 384, 128), (32, 16, 512, 512), (2, 33, 288, 32), (3, 16, 1024, 64)],
)
def test_odd_sizes(device: torch.device, kind: str, rows: int, outputs: int, inputs: int, group: int) -> None:
    # From 17 rows of bf16 on, activations for FP8 weights are FP8, too: see `test_quantized_rows`.
    dtype = torch.float16 if device.type == "cpu" or rows > 16 else torch.bfloat16
    x = torch.randn(rows, inputs, device=device).to(dtype)
    check_linear(x, a_weight(kind, outputs, inputs, dtype, group).to(device), backend="triton")


@pytest.mark.parametrize("around", [AROUND[0], AROUND[2], AROUND[4]], ids=str)
@pytest.mark.parametrize("kind", ALL)
def test_many_rows(device: torch.device, kind: str, around: dict[str, Any]) -> None:
    """Dequantised into a scratch, or, on a GPU in bf16, products of FP8."""
    dtype = torch.float16
    x = torch.randn(70, 160, device=device).to(dtype)
    check_linear(x, a_weight(kind, 48, 160, dtype).to(device), backend="triton", **around)


@pytest.mark.parametrize("kind", ALL)
def test_no_rows(device: torch.device, kind: str) -> None:
    weight = a_weight(kind, 48, 128, torch.float16).to(device)
    assert linear(torch.empty(0, 128, dtype=torch.float16, device=device), weight, backend="triton").shape == (0, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_rows(device: torch.device, kind: str) -> None:
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(40, 256, device=device).to(dtype)
    weight = a_weight(kind, 32, 256, dtype, 128).to(device)
    whole = linear(x, weight, backend="triton", batch_invariant=True)
    for rows in (1, 16, 17, 33):
        assert torch.equal(linear(x[:rows], weight, backend="triton", batch_invariant=True), whole[:rows]), rows


@pytest.mark.parametrize("rows", [3, 70])
def test_parts_of_weights(device: torch.device, rows: int) -> None:
    """Views whose rows are further apart than they are long."""
    for kind in KINDS:
        weight = random_weight(kind, 384, 512).to(device)
        x = torch.randn(rows, 128, device=device).half()
        assert not isinstance(weight, torch.Tensor)
        check_linear(x, weight.outputs(128, 256).inputs(128, 256), backend="triton")


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_activation_order(device: torch.device, backend: str) -> None:
    if device.type == "cuda" and backend == "cpu":
        pytest.skip("a CPU's form")
    weight = random_weight("int4 zeros", 32, 128)
    assert isinstance(weight, Int4Groups)
    weight = replace(weight, permutation=torch.randperm(128)).to(device)
    check_linear(torch.randn(4, 128, device=device).half(), weight, backend=backend)


@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize("inputs", [37, 100])
def test_inputs_that_fill_no_words(device: torch.device, inputs: int, rows: int) -> None:
    for kind in ("channels", "blocks"):
        weight = quantize_fp8(torch.randn(20, inputs), kind).to(device)
        x = torch.randn(rows, inputs, device=device).half()
        check_linear(x, weight, backend="triton")
        if inputs % 4:
            with pytest.raises(ValueError, match="batch_invariant: the weight's inputs do not fill words"):
                linear(x, weight, backend="triton", batch_invariant=True)


def test_blocks_of_fewer_outputs(device: torch.device) -> None:
    weight = quantize_fp8(torch.randn(200, 256), "blocks").to(device)
    assert isinstance(weight, Fp8Blocks)
    weight = weight.with_rows(32)
    for rows in (4, 70):
        check_linear(torch.randn(rows, 256, device=device).half(), weight, backend="triton")


def test_groups_that_the_kernels_do_not_take(device: torch.device) -> None:
    """No power of two, or zeros that do not lie as the scales do."""
    zeros = random_weight("int4 zeros", 16, 128)
    assert isinstance(zeros, Int4Groups)
    assert zeros.zeros is not None
    apart = replace(zeros, zeros=zeros.zeros.T.contiguous().T)
    for weight in (random_weight("int4 zeros", 16, 144, group=24), apart):
        for rows in (2, 40, 70):
            check_linear(torch.randn(rows, weight.shape[1], device=device).half(), weight.to(device), backend="triton")


def test_scales_of_e8m0_at_their_ends(device: torch.device) -> None:
    weight = random_weight("mxfp4", 16, 128)
    assert not isinstance(weight, torch.Tensor)
    for exponent in (0, 20, 127, 200):
        scaled = replace(weight, scales=torch.full_like(weight.scales, exponent)).to(device)
        for rows in (2, 40, 70):
            x = torch.randn(rows, 128, device=device)
            exact = x.double() @ scaled.dequantize(torch.float64).T
            error = (linear(x, scaled, backend="triton").double() - exact).abs().max()
            assert error <= 1e-5 * exact.abs().max(), (exponent, rows)
    scales = weight.scales.clone()
    scales[3, 0] = 255
    out = linear(torch.randn(2, 128, device=device), replace(weight, scales=scales).to(device), backend="triton")
    assert out[:, 3].isnan().all()
    assert not out[:, :3].isnan().any()


@pytest.mark.parametrize("backend", ["cpu", "reference", "triton"])
def test_gates_before_the_product(device: torch.device, backend: str) -> None:
    if device.type == "cuda" and backend == "cpu":
        pytest.skip("a CPU's form")
    for kind in ALL:
        weight = a_weight(kind, 48, 128, torch.float16).to(device)
        for rows in (3, 70):
            x = torch.randn(rows, 256, device=device).half()
            gates, ups = x.chunk(2, 1)
            hidden = torch.nn.functional.silu(gates) * ups
            out = linear(x, weight, gated_input=True, backend=backend)
            wanted = linear(hidden, weight, backend=backend)
            assert (out - wanted).abs().max() <= 4e-3 * wanted.abs().max(), (kind, rows)


def test_outputs_of_many_experts_fit_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dims of a grid but the first hold 65,535 blocks at most."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(dequantize_kernel, "launch", lambda _, grid, *__, **___: grids.append(grid))
    packed = kernel_weight(random_weight("mxfp4", 8, 64, group=32))
    assert packed is not None
    packed = packed._replace(numbers=packed.numbers.to("meta"))
    assert dequantize_kernel.dequantized(packed, 2**21, 64, torch.bfloat16).shape == (2**21, 64)
    assert all(blocks <= 65_535 for blocks in grids[0][1:])


def test_wrong_calls_are_refused() -> None:
    x, weight = torch.randn(2, 128), random_weight("fp8 channels", 16, 128)
    with pytest.raises(ValueError, match=r"x: shape \(2, 64\) does not fit a weight of 128 inputs"):
        linear(x[:, :64], weight)
    with pytest.raises(ValueError, match=r"x: torch\.float64"):
        linear(x.double(), weight)
    with pytest.raises(ValueError, match="bias: shape"):
        linear(x, weight, torch.zeros(8))
    with pytest.raises(ValueError, match="gated: 15 outputs"):
        linear(x, random_weight("fp8 channels", 15, 128), gated=True)
    with pytest.raises(ValueError, match="activation: 'relu'"):
        linear(x, weight, gated=True, activation="relu")
    with pytest.raises(ValueError, match="add_to"):
        linear(x, weight, add_to=torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"weight: torch\.float16 does not fit x"):
        linear(x, torch.zeros(16, 128).half())
    with pytest.raises(ValueError, match="see `moe` for experts"):
        linear(x, torch.zeros(2, 16, 128))
    with pytest.raises(ValueError, match="backend 'cpu' cannot promise it"):
        linear(x, weight, batch_invariant=True)
