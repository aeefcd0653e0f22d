"""The choice of experts in one kernel: a program of one warp for each token."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import launch
from longreach_kernels.moe.routing import Routing


@triton.jit
def _best(values, places, COUNT: tl.constexpr):
    """The greatest value and the first place that has it; NaNs leave a place that is there."""
    best = tl.max(values, 0)
    return best, tl.minimum(tl.min(tl.where(values == best, places, COUNT), 0), COUNT - 1)


@triton.jit
def _route_kernel(
    Logits,
    Correction,
    Chosen,
    Weights,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SCORES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EPSILON: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_2: tl.constexpr,
    SOFTCAP: tl.constexpr,
    JITTER: tl.constexpr,
):
    """Grid (T,). Groups and their experts are padded to powers of two each."""
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = E // GROUPS
    groups = tl.arange(0, PADDED_GROUPS)
    within = tl.arange(0, PADDED_SIZE)
    expert = groups[:, None] * SIZE + within[None, :]
    inside = (groups < GROUPS)[:, None] & (within < SIZE)[None, :]
    logits = tl.load(Logits + token * E + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTCAP is not None:  # tanh(y) is 2 sigmoid(2 y) - 1
        logits = tl.where(inside, SOFTCAP * (2.0 / (1.0 + tl.exp(-2.0 / SOFTCAP * logits)) - 1.0), float("-inf"))
    if SCORES == "softmax":
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    choice = scores
    if SCORES == "sigmoid" and GROUPS == 1 and Correction is None:
        choice = logits
    if Correction is not None:
        choice += tl.load(Correction + expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        first = tl.max(choice, 1)
        if TOP_2:
            place = tl.min(tl.where(choice == first[:, None], within[None, :], PADDED_SIZE), 1)
            first += tl.max(tl.where(within[None, :] == place[:, None], float("-inf"), choice), 1)
        first = tl.where(groups < GROUPS, first, float("-inf"))
        kept = tl.zeros((PADDED_GROUPS,), tl.int1)
        for _ in tl.static_range(TOP_GROUPS):
            _, group = _best(first, groups, GROUPS)
            kept = kept | (groups == group)
            first = tl.where(groups == group, float("-inf"), first)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    COUNT: tl.constexpr = PADDED_GROUPS * PADDED_SIZE
    choice = tl.reshape(choice, (COUNT,))
    scores = tl.reshape(tl.where(inside, scores, 0.0), (COUNT,))
    numbers = tl.reshape(tl.where(inside, expert, E), (COUNT,))
    ranks = tl.arange(0, PADDED_K)
    chosen = tl.zeros((PADDED_K,), tl.int32)
    weights = tl.full((PADDED_K,), float("-inf") if SCORES == "softmax_of_chosen" else 0.0, tl.float32)
    for rank in tl.static_range(TOP_K):
        _, number = _best(choice, numbers, E)
        weight = tl.sum(tl.where(numbers == number, scores, 0.0), 0)
        if SCORES == "sparse_mixer":  # `weight` is the logit
            bound = tl.maximum(tl.abs(scores), weight)
            # Without a division: 0 / 0 is near, too.
            near = (weight - scores <= 2.0 * JITTER * bound) & (choice > float("-inf"))
            weight = 1.0 / tl.sum(tl.where(near, tl.exp(scores - weight), 0.0), 0)
        chosen = tl.where(ranks == rank, number, chosen)
        weights = tl.where(ranks == rank, weight, weights)
        choice = tl.where(numbers == number, float("-inf"), choice)
    if SCORES == "softmax_of_chosen":
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    if RENORMALISE:
        weights = weights / tl.maximum(tl.sum(weights, 0) + EPSILON, LEAST_SUM)
    places = token * TOP_K + ranks
    tl.store(Chosen + places, chosen, mask=ranks < TOP_K)
    tl.store(Weights + places, weights * FACTOR, mask=ranks < TOP_K)


def route(logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `longreach_kernels.moe.route`, in fp32."""
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        launch(
            _route_kernel,
            (tokens,),
            logits.contiguous(),
            correction,
            chosen,
            weights,
            E=experts,
            TOP_K=routing.top_k,
            PADDED_K=triton.next_power_of_2(routing.top_k),
            SCORES=routing.scores,
            RENORMALISE=routing.renormalise,
            EPSILON=routing.epsilon,
            LEAST_SUM=routing.least_sum,
            FACTOR=routing.factor,
            GROUPS=routing.groups,
            PADDED_GROUPS=triton.next_power_of_2(routing.groups),
            PADDED_SIZE=triton.next_power_of_2(experts // routing.groups),
            TOP_GROUPS=routing.top_groups,
            TOP_2=routing.group_score == "top2",
            SOFTCAP=routing.softcap,
            JITTER=routing.jitter,
            num_warps=1,
        )
    return chosen, weights
