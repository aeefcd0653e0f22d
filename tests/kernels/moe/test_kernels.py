"""The kernels of mixture layers: in the interpreter, and on a GPU in graphs and again and again with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longreach_kernels.moe import Experts, Routing, experts_product, route
from longreach_kernels.moe.launch import Call
from longreach_kernels.moe.sort_kernel import sort_pairs
from longreach_kernels.moe.tile_sizes import FewTile, ManyTile, OneTile

from tests.kernels.moe.layers import TOLERANCE, error, random_choice, random_layer
from tests.kernels.moe.test_routing import ROUTINGS

CLAMPED: dict[str, Any] = {
    "activation": "swiglu_clamped",
    "limit": 0.8,
    "alpha": 1.5,
    "interleaved": True,
    "biases": True,
}
# Of 4 experts; tokens for every form, the last ones in tiles of many rows.
FORMS = {"one": 1, "few": 9, "more": 40, "some": 60, "medium": 150, "many": 1000}


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_kernel_chooses_as_the_reference(name: str, device: torch.device) -> None:
    for experts in (24, 100):
        logits, correction = torch.randn(9, experts).to(device), (torch.randn(experts) * 0.2).to(device)
        chosen, weights = route(logits, ROUTINGS[name], correction, backend="triton")
        expected, expected_weights = route(logits, ROUTINGS[name], correction, backend="reference")
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(weights, expected_weights)


def test_the_kernel_takes_the_lower_of_equals_and_survives_what_is_no_number(device: torch.device) -> None:
    assert route(torch.zeros(1, 24, device=device), Routing(3), backend="triton")[0].tolist() == [[0, 1, 2]]
    chosen, _ = route(torch.full((2, 24), torch.nan, device=device), Routing(3), backend="triton")
    assert ((chosen >= 0) & (chosen < 24)).all()


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (9, 4), (150, 16), (900, 64)])
def test_pairs_are_sorted_and_tiles_cover_them(tokens: int, rows: int, device: torch.device) -> None:
    experts, _ = random_choice(tokens, 8, 3, device)
    found = sort_pairs(experts, experts=5, first=2, rows=rows)
    numbers = experts.flatten().cpu() - 2
    expected = [pair for expert in range(5) for pair in (numbers == expert).nonzero().flatten().tolist()]
    assert found.order[: len(expected)].tolist() == expected
    assert found.places[expected].tolist() == list(range(len(expected)))
    tiles = found.tiles[:, : int(found.num_tiles[0])].t().tolist()
    assert int(found.num_tiles[1]) == len(expected)
    covered = [(expert, row) for expert, first, end in tiles for row in range(first, end)]
    assert covered == [(int(numbers[pair]), row) for row, pair in enumerate(expected)]
    assert all(0 < end - first <= rows for _, first, end in tiles)
    assert len(tiles) <= found.tiles.shape[1]


@pytest.mark.parametrize("kind", ["silu", "clamped", "part", "function"])
@pytest.mark.parametrize("form", ["few", "many"])
def test_both_forms_compute_the_product(form: str, kind: str, device: torch.device) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "silu": {},
        "clamped": CLAMPED,
        "part": {"first": 3},
        "function": {"activation": lambda x: x[:, :40].relu() * x[:, 40:]},
    }
    layer = random_layer(4, 48, 40, torch.float32, device, **kinds[kind])
    x, (experts, weights) = torch.randn(30, 48, device=device), random_choice(30, 4 + layer.first, 2, device)
    tile = FewTile(16, 32, 32, 4, 1) if form == "few" else ManyTile(16, 32, 32, 4, 1)
    got = torch.empty_like(x)
    Call(x, experts, weights, layer).add(got, tile, tile, add=False, scale=1.0)
    assert error(got, experts_product(x, experts, weights, layer, backend="reference")) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", ["silu", "clamped", "part", "function"])
def test_one_token_has_kernels_of_its_own(kind: str, device: torch.device) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "silu": {},
        "clamped": CLAMPED,
        "part": {"first": 3},
        "function": {"activation": lambda x: x[:, :40].relu() * x[:, 40:]},
    }
    layer = random_layer(4, 48, 40, torch.float32, device, **kinds[kind])
    x, (experts, weights) = torch.randn(1, 48, device=device), random_choice(1, 4 + layer.first, 3, device)
    stream = torch.randn(1, 48, device=device)
    expected = stream + 0.5 * experts_product(x, experts, weights, layer, backend="reference").double()
    tile = OneTile(8, 32, 4, overlaps=False)
    Call(x, experts, weights, layer).add_one(stream, tile, tile, add=True, scale=0.5)
    assert error(stream, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("tokens", [1, 9])
def test_the_sum_goes_to_the_residual_stream(tokens: int, device: torch.device) -> None:
    layer = random_layer(6, 48, 40, torch.float16, device, first=1, biases=True)
    x, (experts, weights) = torch.randn(tokens, 48).half().to(device), random_choice(tokens, 8, 3, device)
    stream = torch.randn(tokens, 48).half().to(device)
    expected = stream + 0.5 * experts_product(x, experts, weights, layer, backend="reference").double()
    given = experts_product(x, experts, weights, layer, add_to=stream, scale=0.5, backend="triton")
    assert given is stream
    assert error(stream, expected) < TOLERANCE[torch.float16]


def on_gpu(dtype: torch.dtype, tokens: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Experts]:
    """x, experts, weights and a layer of sizes that no tile divides."""
    layer = random_layer(4, 320, 192, dtype, "cuda", **more)
    return torch.randn(tokens, 320).to("cuda", dtype), *random_choice(tokens, 4, 2, "cuda"), layer


GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))


def gpu(test: Any) -> Any:
    """Both marks."""
    for mark in GPU:
        test = mark(test)
    return test


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_on_a_gpu_computes_the_product(form: str, dtype: torch.dtype) -> None:
    for more in ({}, CLAMPED):
        x, experts, weights, layer = on_gpu(dtype, FORMS[form], **more)
        got = experts_product(x, experts, weights, layer)
        some = slice(0, 40)
        expected = experts_product(x[some].double(), experts[some], weights[some], layer, backend="reference")
        assert error(got[some], expected) < TOLERANCE[dtype]
        whole = experts_product(x.cpu(), experts.cpu(), weights.cpu(), moved(layer, "cpu"))
        assert error(got, whole.double().cuda()) < 2 * TOLERANCE[dtype]


def moved(layer: Experts, device: str) -> Experts:
    """The same layer on another device."""
    biases = (None if bias is None else bias.to(device) for bias in (layer.gate_up_bias, layer.down_bias))
    rest = {"activation": layer.activation, "alpha": layer.alpha, "limit": layer.limit}
    return Experts(layer.gate_up.to(device), layer.down.to(device), *biases, interleaved=layer.interleaved, **rest)


@gpu
@pytest.mark.parametrize("form", FORMS)
def test_the_same_call_gives_the_same_bits_a_hundred_times(form: str) -> None:
    x, experts, weights, layer = on_gpu(torch.bfloat16, FORMS[form], **CLAMPED)
    first = experts_product(x, experts, weights, layer)
    for _ in range(100):
        assert torch.equal(experts_product(x, experts, weights, layer), first)


@gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_graph_computes_what_is_chosen_when_it_is_replayed(form: str) -> None:
    x, _, _, layer = on_gpu(torch.bfloat16, FORMS[form])
    logits = torch.randn(len(x), 4, device="cuda")

    def compute() -> torch.Tensor:
        return experts_product(x, *route(logits, Routing(2, renormalise=True)), layer)

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for seed in range(3):
        torch.manual_seed(seed)
        logits.copy_(torch.randn(len(x), 4))
        x.copy_(torch.randn(len(x), 320))
        graph.replay()
        assert torch.equal(out, compute())


@gpu
def test_a_token_has_the_same_bits_alone_and_in_a_crowd() -> None:
    for more in ({}, CLAMPED):
        x, experts, weights, layer = on_gpu(torch.bfloat16, 2000, **more)
        crowd = experts_product(x, experts, weights, layer, batch_invariant=True)
        for size in (1, 7, 100, 700):
            some = slice(50, 50 + size)
            alone = experts_product(x[some], experts[some], weights[some], layer, batch_invariant=True)
            assert torch.equal(alone, crowd[some]), size
