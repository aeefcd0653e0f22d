"""The products of tokens with their experts: the CPU's form, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from longreach_kernels.linear import take_experts
from longreach_kernels.moe import Experts, experts_product

from tests.kernels.moe.layers import TOLERANCE, error, random_choice, random_layer

KINDS: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu": {"activation": "gelu_tanh"},
    "clamped": {"activation": "swiglu_clamped", "limit": 0.8, "alpha": 1.5, "interleaved": True, "biases": True},
    "function": {"activation": lambda x: x[:, :24].relu() * x[:, 24:]},
    "part": {"first": 3},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_product_on_a_cpu_is_that_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    layer = random_layer(4, 32, 24, dtype, **KINDS[kind])
    x, (experts, weights) = torch.randn(13, 32).to(dtype), random_choice(13, 8 if kind == "part" else 4, 2)
    expected = experts_product(x.double(), experts, weights, layer, backend="reference")
    got = experts_product(x, experts, weights, layer, backend="cpu")
    assert got.dtype == dtype
    assert error(got, expected) < TOLERANCE[dtype]
    stream = torch.randn(13, 32).to(dtype)
    added = stream.double() - 0.5 * expected
    assert experts_product(x, experts, weights, layer, add_to=stream, scale=-0.5, backend="cpu") is stream
    assert error(stream, added) < TOLERANCE[dtype]


def test_experts_of_ranks_add_up_to_the_whole() -> None:
    whole = random_layer(8, 32, 24, torch.float64)
    x, (experts, weights) = torch.randn(13, 32, dtype=torch.float64), random_choice(13, 8, 3)
    parts = [
        dataclasses.replace(
            whole, gate_up=take_experts(whole.gate_up, a, a + 4), down=take_experts(whole.down, a, a + 4), first=a
        )
        for a in (0, 4)
    ]
    total = sum(experts_product(x, experts, weights, part) for part in parts)
    torch.testing.assert_close(total, experts_product(x, experts, weights, whole))


def test_no_tokens_give_nothing() -> None:
    layer = random_layer(4, 32, 24, torch.float32)
    none = torch.zeros(0, 2)
    assert experts_product(torch.zeros(0, 32), none.int(), none, layer).shape == (0, 32)


def test_weights_that_do_not_fit_are_refused() -> None:
    up, down = torch.zeros(2, 12, 8), torch.zeros(2, 8, 6)
    for arguments, message in [
        ((up[0], down), "gate_up, down: expected"),
        ((up, down[:1]), "down: expected"),
        ((up, torch.zeros(2, 8, 5)), "down: expected"),
        ((up, down, torch.zeros(2, 6)), "gate_up_bias: expected"),
        ((up, down, None, torch.zeros(2, 6)), "down_bias: expected"),
        ((up, down, None, None, "tanh"), "activation: 'tanh'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Experts(*arguments)


def test_arguments_that_do_not_fit_are_refused() -> None:
    layer = random_layer(4, 32, 24, torch.float32)
    x, experts, weights = torch.zeros(3, 32), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    for arguments, options, message in [
        ((x[:, :8], experts, weights), {}, "x: expected"),
        ((x, experts[:2], weights), {}, "experts: expected"),
        ((x, weights, weights), {}, "experts: expected int32"),
        ((x, experts, weights[:, :1]), {}, "weights: expected"),
        ((x, experts, weights), {"add_to": x.half()}, "add_to: expected"),
        ((x, experts, weights), {"batch_invariant": True}, "batch_invariant: the backend 'cpu'"),
    ]:
        with pytest.raises(ValueError, match=message):
            experts_product(*arguments, layer, **options)
