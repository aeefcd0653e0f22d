"""Products whose rows do not depend on their number: right, the same bits in every way, and compiled as is meant."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
import torch
from longreach_patches import UnsupportedModelError, patch
from longreach_patches.fused import gated_activation, invariant
from longreach_patches.fused.activation import Activation
from longreach_patches.fused.invariant import invariant_product
from longreach_patches.fused.invariant_tiles import candidates, choose, tiles_of
from torch import Tensor

from tests.kernels.compiled import compiled
from tests.kernels.rowwise import rowwise
from tests.patches.conftest import build
from tests.patches.test_fused import CASES, check
from tests.patches.test_pages import PagedSequences
from tests.patches.test_patch import prompt

GPU = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=CASES, ids=str)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, torch.dtype]:
    """Device and dtype; "cpu" is Triton's interpreter."""
    device, dtype = request.param
    if device == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("the interpreter is tested where there is no GPU")
        monkeypatch.setattr(np, "matmul", rowwise)
    return device, dtype


def operands(rows: int, outputs: int, inputs: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows whose sizes differ, so that a sum in another order is another number, and weights."""
    sizes = torch.rand(rows, 1, device=device).mul(6).exp2()
    x = (torch.randn(rows, inputs, device=device) * sizes).to(dtype)
    return x, (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize(
    "form", ["plain", "bias", "gated", "gated bias", "gated gelu_tanh", "add", "add scaled", "columns"]
)
def test_products_are_right(place: tuple[str, torch.dtype], rows: int, form: str) -> None:
    device, dtype = place
    inputs, outputs = 104, 72
    x, wide = operands(rows, outputs, 3 * inputs, device, dtype)
    x = x[:, :inputs].contiguous()
    weight = wide[:, inputs : 2 * inputs] if form == "columns" else wide[:, :inputs].contiguous()
    bias, residual = torch.randn(outputs, device=device).to(dtype), torch.randn(rows, outputs, device=device).to(dtype)
    has_bias, gated, add = "bias" in form, "gated" in form, "add" in form
    activation: Activation = "gelu_tanh" if "gelu_tanh" in form else "silu"
    scale = 0.3 if "scaled" in form else 1.0

    def eager(dtype: torch.dtype) -> Tensor:
        out = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), bias.to(dtype) if has_bias else None)
        if gated:
            return gated_activation(out, activation, "reference")
        return out * scale + residual.to(dtype) if add else out

    into = residual.clone() if add else None
    options = {"gated": gated, "activation": activation, "add_to": into, "scale": scale}
    actual = invariant_product(x, weight, bias if has_bias else None, **options)
    assert not add or actual is into
    slack = torch.finfo(torch.float32).eps * (x.float().abs() @ weight.float().abs().T).max().item()
    check(actual, eager(torch.float64), eager(dtype), slack * (x.abs().max().item() if gated else 1))


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_among_any_others(place: tuple[str, torch.dtype], gated: bool) -> None:
    device, dtype = place
    x, weight = operands(70, 72, 200, device, dtype)
    whole = invariant_product(x, weight, gated=gated)
    for first, last in ((0, 1), (3, 4), (31, 33), (5, 70)):
        assert torch.equal(invariant_product(x[first:last].contiguous(), weight, gated=gated), whole[first:last])
    x[:30], x[31:] = float("nan"), float("inf")
    assert torch.equal(invariant_product(x, weight, gated=gated)[30], whole[30])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_every_tile_gives_the_same_bits(dtype: torch.dtype, gated: bool) -> None:
    x, weight = operands(300, 1040, 4096, "cuda", dtype)
    outputs = 520 if gated else 1040
    results = []
    for tile in candidates(dtype, invariant.capability(x.device), gated):
        out = x.new_empty(300, outputs)
        invariant._launch(tile, x, weight, None, out, outputs, gated, False, 132)
        results.append(out)
    assert all(torch.equal(out, results[0]) for out in results)


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", [1024, 6144])
def test_any_number_of_rows_gives_the_same_bits(outputs: int) -> None:
    x, weight = operands(4096, outputs, 1024, "cuda", torch.bfloat16)
    whole = invariant_product(x, weight)
    for rows in range(1, 4097):
        first = (4096 - rows) // 2
        part = invariant_product(x[first : first + rows], weight)
        assert torch.equal(part, whole[first : first + rows]), rows


@pytest.mark.parametrize("gated", [False, True])
def test_tiles_for_hopper_all_take_one_instruction(gated: bool) -> None:
    for tile in candidates(torch.bfloat16, 90, gated):
        assert tile.block_m % (16 * tile.num_warps) == 0, "a group of four warps has fewer than 64 rows"
    chosen = {choose(rows, 6144, torch.bfloat16, 90, 132, gated) for rows in range(1, 4097)}
    assert len(chosen) > 2
    few, many = (choose(rows, 4096, torch.bfloat16, 90, 132, gated) for rows in (1, 8192))
    assert tiles_of(few, 1, 4096) >= 60, "too few multiprocessors read the weights"
    assert many.block_m * many.block_n * (2 if gated else 1) == 128 * 256


@functools.cache
def tiles_for_sm90() -> dict[str, dict]:
    """What the compiler makes of every tile."""
    return compiled("tests.patches.compile_invariant")


def test_tiles_compile_for_hopper_without_spills() -> None:
    for name, facts in tiles_for_sm90().items():
        assert facts["spills"] == facts["stack_bytes"] == 0, name
        assert facts["shared_bytes"] <= 227 * 1024, name
        assert facts["tma_loads"] > 0, name
        [loop] = facts["loops"]
        assert loop["waits"] <= 2, f"{name}: products wait for each other"


def test_tiles_for_hopper_multiply_with_one_instruction() -> None:
    for name, facts in tiles_for_sm90().items():
        assert facts["wgmma"] > 0, name
        assert facts["other_products"] == 0, name


@torch.no_grad()
def test_a_patched_model_gives_the_same_bits_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    monkeypatch.setattr(np, "matmul", rowwise)
    sequences = [prompt(n, seed=n)[0] for n in (37, 20)]
    model = build("qwen3-mixed").float()
    expected = [model(ids[None]).logits[0] for ids in sequences]
    handle = patch(model, "triton", batch_invariant=True)
    handle.fuse_layers()
    whole, cut = (PagedSequences(model, sequences).steps(s) for s in ([[37, 0], [0, 20]], [[33, 7], [4, 13]]))
    for one, other, eager in zip(whole, cut, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, eager, rtol=1e-3, atol=1e-5)
    handle.undo()
    assert "forward" not in model.lm_head.__dict__


def test_a_backend_of_libraries_is_refused() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="attention backend 'cpu' rests on libraries"):
        patch(model, "cpu", batch_invariant=True)
    assert "forward" not in model.lm_head.__dict__
    with pytest.raises(UnsupportedModelError, match="patched already"):
        patch(patch(model, "cpu").model, "cpu")
