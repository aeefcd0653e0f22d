"""Experts are chosen and weighed as the families' own routers do it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from longreach_kernels.moe import Routing, route

ROUTINGS = {
    "qwen": Routing(3, renormalise=True),
    "olmoe": Routing(3),
    "gpt-oss": Routing(4, "softmax_of_chosen"),
    "minimax": Routing(4, "sigmoid", renormalise=True),
    "glm": Routing(2, "sigmoid", renormalise=True, epsilon=1e-20, factor=2.5, groups=4, top_groups=2),
    "deepseek": Routing(3, groups=4, top_groups=3, group_score="max", factor=16.0),
    "ernie": Routing(3, renormalise=True, least_sum=0.7),
    "laguna": Routing(3, "sigmoid", renormalise=True, softcap=1.5),
    "cohere": Routing(3, "sigmoid"),
    "phi": Routing(2, "sparse_mixer", jitter=0.3),
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_choice_in_torch_is_that_of_the_reference(name: str, corrected: bool) -> None:
    logits = torch.randn(40, 24, dtype=torch.float64)
    correction = torch.randn(24, dtype=torch.float64) * 0.2 if corrected else None
    experts, weights = route(logits, ROUTINGS[name], correction, backend="cpu")
    expected, expected_weights = route(logits, ROUTINGS[name], correction, backend="reference")
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert experts.dtype == torch.int32
    assert weights.dtype == torch.float64
    assert route(logits.half(), ROUTINGS[name], backend="cpu")[1].dtype == torch.float32


def test_of_equal_scores_the_lower_expert_comes_first() -> None:
    for backend in ("cpu", "reference"):
        experts, weights = route(torch.zeros(2, 8), Routing(3), backend=backend)
        assert experts.tolist() == [[0, 1, 2]] * 2
        assert weights.tolist() == [[0.125] * 3] * 2


def test_a_correction_changes_the_choice_and_no_weight() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    correction = torch.tensor([9.0, 0.0, 0.0, 0.0])
    experts, weights = route(logits, Routing(2, "sigmoid"), correction, backend="cpu")
    assert experts.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [0, 3]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scores": "tanh"}, "scores: 'tanh' is not one of"),
        ({"group_score": "mean"}, "group_score: 'mean'"),
        ({"top_k": 0}, "top_k: must be at least 1"),
        ({"top_groups": 2}, "top_groups: must lie between 1 and groups=1, got 2"),
        ({"softcap": 0.0}, "softcap: must be positive"),
    ],
)
def test_a_routing_that_means_nothing_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Routing(2), **fields)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(2, groups=3), "groups: 3 groups do not divide 8 experts"),
        (Routing(3, groups=4), "top_k: 3 experts of 2"),
        (Routing(1, groups=8), "group_score: 'top2' needs two experts"),
        (Routing(9), "top_k: 9 experts of 8"),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused(routing: Routing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(1, 8), routing)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="logits: expected"):
        route(torch.zeros(8), Routing(2))
    with pytest.raises(ValueError, match="correction: expected"):
        route(torch.zeros(1, 8), Routing(2), torch.zeros(7))
