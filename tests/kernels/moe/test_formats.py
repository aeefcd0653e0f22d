"""Experts whose weights have a format: each form against unpacked weights in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from longreach_kernels.linear import Fp8Channels, Weight, dequantize
from longreach_kernels.moe import Experts, experts_product
from longreach_kernels.moe.launch import Call
from longreach_kernels.moe.products import unpacked_weight
from longreach_kernels.moe.tile_sizes import FewTile, ManyTile, OneTile

from tests.kernels.moe.formats_for_tests import KINDS, random_packed
from tests.kernels.moe.layers import TOLERANCE, error, random_choice
from tests.kernels.moe.test_kernels import CLAMPED, FORMS, gpu


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_computes_with_unpacked_weights(kind: str) -> None:
    layer = random_packed(kind, 4, 64, 96, torch.float32)
    x, (experts, weights) = torch.randn(9, 64), random_choice(9, 4, 2)
    expected = experts_product(x, experts, weights, layer, backend="reference").double()
    assert error(experts_product(x, experts, weights, layer, backend="cpu"), expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_all_experts_are_unpacked_together(kind: str, device: torch.device) -> None:
    layer = random_packed(kind, 3, 160, 96, torch.float32, device)
    for weight in (layer.gate_up, layer.down):
        assert not isinstance(weight, torch.Tensor)
        got, expected = unpacked_weight(weight, torch.float16), dequantize(weight, torch.float16)
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_are_multiplied_with_packed_weights(kind: str, device: torch.device) -> None:
    more = CLAMPED if kind == "mxfp4" else {}
    layer = random_packed(kind, 4, 160, 96, torch.float32, device, **more)
    for tokens in (1, 9):
        x, (experts, weights) = torch.randn(tokens, 160, device=device), random_choice(tokens, 4, 2, device)
        got = torch.empty_like(x)
        tile = FewTile(16, 16, 256, 2, 1)
        Call(x, experts, weights, layer).add(got, tile, tile, add=False, scale=1.0)
        expected = experts_product(x, experts, weights, layer, backend="reference").double()
        assert error(got, expected) < TOLERANCE[torch.float32]
        if tokens == 1:
            got = experts_product(x, experts, weights, layer, backend="triton")
            assert error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_is_multiplied_with_packed_weights(kind: str, device: torch.device) -> None:
    more = CLAMPED if kind == "mxfp4" else {}
    layer = random_packed(kind, 4, 160, 96, torch.float32, device, **more)
    x, (experts, weights) = torch.randn(1, 160, device=device), random_choice(1, 4, 3, device)
    got = torch.empty_like(x)
    tile = OneTile(8, 64, 4, overlaps=False)
    Call(x, experts, weights, layer).add_one(got, tile, tile, add=False, scale=1.0)
    expected = experts_product(x, experts, weights, layer, backend="reference").double()
    assert error(got, expected) < TOLERANCE[torch.float32]


PACKED = [kind for kind in KINDS if not kind.startswith("fp8")]


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("form", ["both", "up", "down", "function"])
def test_many_rows_are_multiplied_with_weights_unpacked_in_registers(
    form: str, kind: str, device: torch.device
) -> None:
    more = {"biases": True, "interleaved": True} if kind == "mxfp4" else {}
    if form == "function":
        more["activation"] = lambda x: x[:, :96].relu() * x[:, 96:]
    layer = random_packed(kind, 4, 160, 96, torch.float32, device, **more)
    x, (experts, weights) = torch.randn(12, 160, device=device), random_choice(12, 4, 2, device)
    got = torch.empty_like(x)
    unpacking, plain = ManyTile(16, 64, 128, 4, 1, unpacks=True), ManyTile(16, 64, 64, 4, 1)
    tiles = (plain if form == "down" else unpacking, plain if form == "up" else unpacking)
    Call(x, experts, weights, layer).add(got, *tiles, add=False, scale=1.0)
    expected = experts_product(x, experts, weights, layer, backend="reference").double()
    assert error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("fp8")])
@pytest.mark.parametrize("gathered", [False, True])
def test_many_rows_are_multiplied_in_fp8(
    kind: str, gathered: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach_kernels.moe.launch.is_gathered_first", lambda _: gathered)
    monkeypatch.setattr(Call, "is_fp8", lambda *_: True)
    if device.type == "cpu":  # the interpreter rounds 1.99 to 1 on the way to FP8
        monkeypatch.setattr("longreach_kernels.moe.launch.rows_by_token", lambda x, bound: rounded(x, x.shape[1]))
        monkeypatch.setattr("longreach_kernels.moe.launch.rows_by_group", lambda x: rounded(x, 128))
    layer = random_packed(kind, 4, 160, 96, torch.float32, device, biases=True)
    x, (experts, weights) = torch.randn(40, 160, device=device), random_choice(40, 4, 2, device)
    got = torch.empty_like(x)
    tile = ManyTile(32, 32, 128, 4, 1)
    Call(x, experts, weights, layer).add(got, tile, tile, add=False, scale=1.0)
    assert error(got, with_quantized_rows(x, experts, weights, layer, kind)) < 5e-3


def rounded(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (T, K) in FP8 of rows, and a scale (T, groups) for each `width` inputs, with neighbouring tokens."""
    parts = rows.split(width, 1)
    scales = torch.stack([part.abs().amax(1) for part in parts]) / 448
    values = [part / scale[:, None] for part, scale in zip(parts, scales, strict=True)]
    return torch.cat(values, 1).to(torch.float8_e4m3fn), scales.t()


def with_quantized_rows(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, layer: Experts, kind: str
) -> torch.Tensor:
    """The sum over a token's experts in fp64, of rows that are quantised as for products of many rows."""

    def wide(weight: Weight) -> torch.Tensor:
        return dequantize(weight, torch.float64)

    def again(rows: torch.Tensor) -> torch.Tensor:
        width = 128 if "blocks" in kind else rows.shape[1]
        values, scales = rounded(rows.double(), width)
        return values.double() * scales.repeat_interleave(width, 1)[:, : rows.shape[1]]

    up, down = wide(layer.gate_up), wide(layer.down)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for rank in range(experts.shape[1]):
        of = experts[:, rank].long()
        gate_up = (up[of] @ again(x)[..., None])[..., 0]
        if layer.gate_up_bias is not None:
            gate_up += layer.gate_up_bias[of].double()
        gate, up_ = (gate_up[:, ::2], gate_up[:, 1::2]) if layer.interleaved else gate_up.chunk(2, 1)
        result = (down[of] @ again(torch.nn.functional.silu(gate) * up_)[..., None])[..., 0]
        if layer.down_bias is not None:
            result += layer.down_bias[of].double()
        out += weights[:, rank, None].double() * result
    return out


@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 blocks of 64"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tiles_of_fp8_blocks_lie_side_by_side(
    interleaved: bool, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Call, "is_fp8", lambda *_: True)
    if device.type == "cpu":
        monkeypatch.setattr("longreach_kernels.moe.launch.rows_by_group", lambda x: rounded(x, 128))
    layer = random_packed(kind, 4, 160, 96, torch.float32, device, biases=True, interleaved=interleaved)
    x, (experts, weights) = torch.randn(12, 160, device=device), random_choice(12, 4, 2, device)
    expected = with_quantized_rows(x, experts, weights, layer, kind)
    got = torch.empty_like(x)
    tile = ManyTile(16, 32, 128, 4, 1, twice=True)
    Call(x, experts, weights, layer).add(got, tile, tile, add=False, scale=1.0)
    assert error(got, expected) < 5e-3


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_format_on_a_gpu(form: str, kind: str) -> None:
    more: dict[str, Any] = CLAMPED if kind == "mxfp4" else {}
    layer = random_packed(kind, 4, 320, 192, torch.bfloat16, "cuda", **more)
    tokens = FORMS[form]
    x, (experts, weights) = torch.randn(tokens, 320, device="cuda").bfloat16(), random_choice(tokens, 4, 2, "cuda")
    got = experts_product(x, experts, weights, layer)
    some = slice(0, 40)
    expected = experts_product(x[some].double(), experts[some], weights[some], layer, backend="reference")
    # Rows of FP8 have four bits, and two products are made of them.
    limit = 0.1 if kind.startswith("fp8") else TOLERANCE[torch.bfloat16]
    assert error(got[some], expected) < limit
    for _ in range(20):
        assert torch.equal(experts_product(x, experts, weights, layer), got)


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_in_a_crowd_with_every_format(kind: str) -> None:
    layer = random_packed(kind, 4, 320, 192, torch.bfloat16, "cuda")
    x, (experts, weights) = torch.randn(1500, 320, device="cuda").bfloat16(), random_choice(1500, 4, 2, "cuda")
    crowd = experts_product(x, experts, weights, layer, batch_invariant=True)
    for size in (1, 7, 100, 700):
        some = slice(50, 50 + size)
        alone = experts_product(x[some], experts[some], weights[some], layer, batch_invariant=True)
        assert torch.equal(alone, crowd[some]), size


def test_a_part_of_the_outputs_is_read_as_it_lies(device: torch.device) -> None:
    layer = random_packed("fp8 channels", 4, 160, 96, torch.float32, device)
    assert isinstance(layer.gate_up, Fp8Channels)
    wider = dataclasses.replace(
        layer.gate_up,
        values=torch.cat([layer.gate_up.values.view(torch.uint8)] * 2, 1).view(layer.gate_up.values.dtype),
        scales=torch.cat([layer.gate_up.scales] * 2, 1),
    )
    part = dataclasses.replace(layer, gate_up=wider.outputs(0, 192))
    x, (experts, weights) = torch.randn(9, 160, device=device), random_choice(9, 4, 2, device)
    expected = experts_product(x, experts, weights, layer, backend="triton")
    assert torch.equal(experts_product(x, experts, weights, part, backend="triton"), expected)
