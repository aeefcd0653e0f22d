"""Weights that are unpacked beside the product before: the same bits, each weight unpacked once, none given away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longreach_kernels.moe import Experts, UnpackedAhead, beside, experts_product, launch, sizes
from torch import Tensor

from tests.kernels.moe.formats_for_tests import random_packed
from tests.kernels.moe.layers import random_choice
from tests.kernels.moe.test_kernels import CLAMPED, gpu

# Tokens of which each of two experts has so many that a product of many rows takes them, and channels and inner
# channels: on a CPU, for Triton's interpreter, and on a GPU.
CPU, GPU = (120, 64, 32), (2000, 512, 512)
Unpackings = list[tuple[tuple[int, ...], int | None]]


@pytest.fixture
def unpackings(monkeypatch: pytest.MonkeyPatch) -> Unpackings:
    """Shapes of weights and programs, of every weight that is unpacked while products are made side by side."""
    made: Unpackings = []
    unpacked_weight = beside.unpacked_weight

    def counted(weight: Any, dtype: torch.dtype, programs: int | None = None, out: Tensor | None = None) -> Tensor:
        made.append((tuple(weight.shape), programs))
        return unpacked_weight(weight, dtype, programs, out)

    monkeypatch.setattr(beside, "unpacked_weight", counted)
    monkeypatch.setattr(sizes, "_UNPACKS_BESIDE_ON", (0, 90))
    monkeypatch.setattr(sizes, "UNPACKING_PROGRAMS", 3)
    return made


def layers_of(kind: str, device: torch.device, count: int = 3) -> tuple[list[Experts], Tensor]:
    """Layers, and tokens for them."""
    tokens, channels, inner = CPU if device.type == "cpu" else GPU
    more: dict[str, Any] = CLAMPED if kind == "mxfp4" else {}
    layers = [random_packed(kind, 2, channels, inner, torch.float16, device, **more) for _ in range(count)]
    return layers, torch.randn(tokens, channels, device=device).half()


def products(
    layers: list[Experts], x: Tensor, chosen: tuple[Tensor, Tensor], ahead: UnpackedAhead | None = None
) -> list[Tensor]:
    """What each layer makes of what the one before gives."""
    results = [x]
    for layer in layers:
        results.append(experts_product(results[-1], *chosen, layer, backend="triton", ahead=ahead))
    return results


@pytest.mark.parametrize("kind", ["mxfp4", "int4 zeros"])
def test_bits_are_the_same_and_each_weight_is_unpacked_once(
    kind: str, device: torch.device, unpackings: Unpackings, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, x = layers_of(kind, device)
    chosen = random_choice(len(x), 2, 2, device)
    expected = products(layers, x, chosen)
    assert not unpackings, "the setting is off by default"
    monkeypatch.setattr(sizes, "UNPACKS_BESIDE", True)
    monkeypatch.setattr(launch, "MAX_TOKENS", len(x) // 2)  # in two parts, of the same weights
    for got, one in zip(products(layers, x, chosen, UnpackedAhead(layers)), expected, strict=True):
        assert torch.equal(got, one)
    up, down = (tuple(weight.shape) for weight in (layers[0].gate_up, layers[0].down))
    # The first and the last are unpacked at once, the second beside the first's product downwards.
    assert unpackings == [(up, None), (down, 3), (up, 3), (down, 3), (up, None), (down, 3)]


def test_what_was_unpacked_for_another_layer_is_dropped(
    device: torch.device, unpackings: Unpackings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "UNPACKS_BESIDE", True)
    layers, x = layers_of("mxfp4", device, 4)
    chosen, ahead = random_choice(len(x), 2, 1, device), UnpackedAhead(layers)
    expected = [products([layer], x, chosen)[1] for layer in layers]
    for index in (0, 2, 1, 2, 0, 3):
        assert torch.equal(products([layers[index]], x, chosen, ahead)[1], expected[index])
    assert ahead.take(layers[1]) is None, "it was dropped when the last layer asked"


def test_few_rows_and_a_failing_product_leave_nothing_behind(
    device: torch.device, unpackings: Unpackings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "UNPACKS_BESIDE", True)
    layers, x = layers_of("mxfp4", device)
    ahead = UnpackedAhead(layers)
    products(layers, x[:9], random_choice(9, 2, 2, device), ahead)
    assert not unpackings
    chosen = random_choice(len(x), 2, 1, device)
    sum_rows = launch.sum_rows

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no sum")

    monkeypatch.setattr(launch, "sum_rows", failing)
    with pytest.raises(RuntimeError, match="no sum"):
        products(layers, x, chosen, ahead)
    monkeypatch.setattr(launch, "sum_rows", sum_rows)
    expected = products(layers, x, chosen)
    assert all(map(torch.equal, products(layers, x, chosen, ahead), expected))


@gpu
@pytest.mark.parametrize("kind", ["mxfp4", "int4"])
def test_a_graph_holds_what_is_unpacked_beside(
    kind: str, unpackings: Unpackings, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, x = layers_of(kind, torch.device("cuda"))
    chosen = random_choice(len(x), 2, 2, "cuda")
    expected = products(layers, x, chosen)
    monkeypatch.setattr(sizes, "UNPACKS_BESIDE", True)
    ahead = UnpackedAhead(layers)
    products(layers, x, chosen, ahead)
    products(layers[:1], x, chosen, ahead)  # something is held while the graph is captured
    graph = torch.cuda.CUDAGraph()
    unpackings.clear()
    with torch.cuda.graph(graph):
        got = products(layers, x, chosen, ahead)
    assert [programs for _, programs in unpackings] == [None, 3] * 3
    for _ in range(10):
        for result in got[1:]:
            result.zero_()
        graph.replay()
        assert all(map(torch.equal, got, expected))


@gpu
def test_memory_that_is_written_beside_is_given_to_nobody(
    unpackings: Unpackings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program unpacks for longer than the host needs to allocate what follows."""
    del unpackings
    layers, x = layers_of("mxfp4", torch.device("cuda"), 4)
    chosen = random_choice(len(x), 2, 2, "cuda")
    expected = products(layers, x, chosen)
    monkeypatch.setattr(sizes, "UNPACKING_PROGRAMS", 1)
    monkeypatch.setattr(sizes, "UNPACKS_BESIDE", True)
    ahead = UnpackedAhead(layers)
    for _ in range(5):
        got = products(layers, x, chosen, ahead)
        for layer in layers:  # what is freed is overwritten
            for weight in (layer.gate_up, layer.down):
                torch.full(weight.shape, torch.nan, dtype=torch.float16, device="cuda")
        assert all(map(torch.equal, got, expected))
