"""Mixture layers in fp64 and in loops over tokens: the specification, and very slow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longreach_kernels.linear import Weight, dequantize, take_experts
from longreach_kernels.moe.experts import Experts
from longreach_kernels.moe.routing import Routing


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `longreach_kernels.moe.route`."""
    added = [0.0] * logits.shape[1] if correction is None else correction.double().tolist()
    rows = [_route_token(row, routing, added) for row in logits.double().tolist()]
    experts = torch.tensor([chosen for chosen, _ in rows], dtype=torch.int32).view(-1, routing.top_k)
    weights = torch.tensor([weights for _, weights in rows], dtype=torch.float64).view(-1, routing.top_k)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return experts.to(logits.device), weights.to(logits.device, dtype)


def _route_token(logits: list[float], routing: Routing, correction: list[float]) -> tuple[list[int], list[float]]:
    if routing.softcap is not None:
        logits = [routing.softcap * math.tanh(one / routing.softcap) for one in logits]
    if routing.scores == "softmax":
        scores = _softmax(logits)
    elif routing.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-one)) for one in logits]
    else:
        scores = logits
    if routing.scores == "sigmoid" and routing.groups == 1 and not any(correction):
        choice = logits
    else:
        choice = [score + more for score, more in zip(scores, correction, strict=True)]
    size = len(choice) // routing.groups
    best_groups = sorted(
        range(routing.groups),
        key=lambda group: (-_group_score(choice[group * size : (group + 1) * size], routing), group),
    )[: routing.top_groups]
    allowed = [expert for expert in range(len(choice)) if expert // size in best_groups]
    chosen = sorted(allowed, key=lambda expert: (-choice[expert], expert))[: routing.top_k]
    weights = [scores[expert] for expert in chosen]
    if routing.scores == "softmax_of_chosen":
        weights = _softmax(weights)
    if routing.scores == "sparse_mixer":
        weights = [_near(logits, chosen[:rank], expert, routing.jitter) for rank, expert in enumerate(chosen)]
    if routing.renormalise:
        total = max(sum(weights) + routing.epsilon, routing.least_sum)
        weights = [weight / total for weight in weights]
    return chosen, [weight * routing.factor for weight in weights]


def _near(logits: list[float], before: list[int], expert: int, jitter: float) -> float:
    """The weight of an expert among those near it, but for those that were chosen before."""
    greatest, total = logits[expert], 0.0
    for other, logit in enumerate(logits):
        bound = max(abs(logit), greatest)
        near = greatest == logit or (greatest - logit) / bound <= 2 * jitter
        total += math.exp(logit - greatest) if near and other not in before else 0.0
    return 1 / total


def _softmax(logits: list[float]) -> list[float]:
    greatest = max(logits)
    powers = [math.exp(one - greatest) for one in logits]
    return [power / sum(powers) for power in powers]


def _group_score(choice: list[float], routing: Routing) -> float:
    ordered = sorted(choice, reverse=True)
    return ordered[0] if routing.group_score == "max" else sum(ordered[:2])


def experts_product(x: Tensor, experts: Tensor, weights: Tensor, layer: Experts) -> Tensor:
    """The sum over a token's experts, (T, C) fp64; arguments as of `longreach_kernels.moe.experts_product`."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (chosen, weighed) in enumerate(zip(experts.tolist(), weights.tolist(), strict=True)):
        for expert, weight in zip(chosen, weighed, strict=True):
            if 0 <= expert - layer.first < layer.count:
                out[token] += weight * _expert(x[token].double(), expert - layer.first, layer)
    return out


def _expert(x: Tensor, expert: int, layer: Experts) -> Tensor:
    inner = _weight(layer.gate_up, expert) @ x
    if layer.gate_up_bias is not None:
        inner = inner + layer.gate_up_bias[expert].double()
    out = _weight(layer.down, expert) @ activate(inner[None], layer)[0]
    return out if layer.down_bias is None else out + layer.down_bias[expert].double()


def _weight(weight: Weight, expert: int) -> Tensor:
    return dequantize(take_experts(weight, expert, expert + 1), torch.float64)[0]


def activate(gate_up: Tensor, layer: Experts) -> Tensor:
    """The activation of outputs of `gate_up`, (rows, 2 I): (rows, I), in their own dtype."""
    if callable(layer.activation):
        return layer.activation(gate_up)
    gate, up = (gate_up[:, 0::2], gate_up[:, 1::2]) if layer.interleaved else gate_up.chunk(2, 1)
    if layer.activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if layer.activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
    return (up + 1) * gate * torch.sigmoid(layer.alpha * gate)
