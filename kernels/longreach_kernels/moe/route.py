"""The choice of experts: one kernel, or the same in torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.moe.routing import Routing


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts. A token's result depends on its own logits alone.

    Args:
        logits: (T, E), of any float dtype; computed in fp32, or in fp64 where they are that.
        correction: (E,), added to scores for the choice only.
        backend: as `longreach_kernels.resolve_backend` takes it.

    Returns:
        Experts (T, k) int32, best first, and their weights (T, k) fp32, or fp64.

    Raises:
        ValueError: shapes do not fit, or so many experts cannot be chosen.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits: expected (T, E), got {tuple(logits.shape)}")
    experts = logits.shape[1]
    routing.check(experts)
    if correction is not None and correction.shape != (experts,):
        raise ValueError(f"correction: expected ({experts},), got {tuple(correction.shape)}")
    name = resolve_backend(backend, logits.device, logits.dtype).name
    if name == "reference":
        from longreach_kernels.moe.reference import route as route_in_loops

        return route_in_loops(logits, routing, correction)
    if name == "cpu":
        return route_in_torch(logits, routing, correction)
    from longreach_kernels.moe.route_kernel import route as route_on_gpu

    return route_on_gpu(logits, routing, correction)


def route_in_torch(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `route`, in torch operations, which wait for nothing either."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if routing.softcap is not None:
        logits = torch.tanh(logits / routing.softcap) * routing.softcap
    scores = _scores(logits, routing)
    by_logits = routing.scores == "sigmoid" and routing.groups == 1
    if correction is not None:
        choice = scores + correction.to(scores.dtype)
    else:
        choice = logits if by_logits else scores
    if routing.groups > 1:
        choice = choice.masked_fill(~_in_top_groups(choice, routing), -torch.inf)
    chosen = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = _near(logits, chosen, routing) if routing.scores == "sparse_mixer" else scores.gather(1, chosen)
    if routing.scores == "softmax_of_chosen":
        weights = weights.softmax(1)
    if routing.renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + routing.epsilon).clamp(min=routing.least_sum)
    return chosen.int(), weights * routing.factor


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    if routing.scores == "softmax":
        return logits.softmax(1)
    return logits.sigmoid() if routing.scores == "sigmoid" else logits


def _near(logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
    """The weights (T, k) of chosen experts, each among those near it that are not chosen before it."""
    left, weights = logits, []
    for expert in chosen.split(1, 1):
        greatest = logits.gather(1, expert)
        far = (greatest - logits) / logits.abs().maximum(greatest) > 2 * routing.jitter
        weights.append(1 / (left - greatest).exp().masked_fill(far, 0).sum(1, keepdim=True))
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(weights, 1)


def _in_top_groups(choice: Tensor, routing: Routing) -> Tensor:
    """(T, E) bool: whether an expert is in one of the token's groups."""
    by_group = choice.view(len(choice), routing.groups, -1)
    best = by_group.amax(2) if routing.group_score == "max" else by_group.topk(2, dim=2).values.sum(2)
    groups = best.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_groups]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
    return kept[..., None].expand_as(by_group).reshape(choice.shape)
