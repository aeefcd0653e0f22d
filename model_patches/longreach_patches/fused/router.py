"""The choice of experts in a fused layer: the router's product, and what `longreach_kernels.moe` makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from longreach_kernels.moe import Routing, route
from torch import Tensor, nn

from longreach_patches.families import Mixture
from longreach_patches.fused.dispatch import MAX_ROWS, uses_triton
from longreach_patches.fused.modules import at_path

# What routers say of their scores in `Mixture.scores_by`.
_SCORES: dict[str, Literal["softmax_of_chosen", "sigmoid"]] = {"softmax": "softmax_of_chosen", "sigmoid": "sigmoid"}


@dataclass(frozen=True)
class Router:
    """How tokens choose experts.

    Attributes:
        weight: (E, C), of the model's dtype or fp32.
        bias: (E,), or None.
        correction: (E,) fp32, what is added to scores for the choice alone, or None.
        routing: what is made of logits.
        backend: as `longreach_kernels.resolve_backend` takes it.
        batch_invariant: whether a token's logits may not depend on the other tokens.
    """

    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None
    routing: Routing
    backend: str
    batch_invariant: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts (T, k) int32 of x (T, C), and their weights (T, k) fp32."""
        return self.choose(self.logits(x))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts (T, k) of tokens with these logits (T, E), and their weights."""
        # Logits are fp32 in every model; the Hopper backend is for 16 bits, and the choice is Triton's there, too.
        backend = "triton" if self.backend == "hopper" else self.backend
        return route(logits, self.routing, self.correction, backend=backend)

    def logits(self, x: Tensor) -> Tensor:
        """(T, E) fp32, rounded to nothing less on the way: experts lie close to each other."""
        weight, bias = self.weight, self.bias
        if self.batch_invariant:
            from longreach_patches.fused.invariant import invariant_product

            wide = torch.float32
            return invariant_product(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        if weight.dtype == x.dtype and x.dtype.itemsize == 2 and x.device.type == "cuda":
            if x.shape[0] <= MAX_ROWS and uses_triton(x, self.backend):
                from longreach_patches.fused.products import product

                return product(x, weight, bias, out_dtype=torch.float32)
            logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
            return logits if bias is None else logits.add_(bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        return nn.functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def router_of(module: Any, mixture: Mixture, backend: str, batch_invariant: bool) -> Router:
    """The router of a mixture's module, with the numbers that its modules have."""
    own = getattr(module, mixture.router)
    linear = own if mixture.logits is None else getattr(own, mixture.logits)
    scores = mixture.scores
    if mixture.scores_by is not None:
        scores = _SCORES[getattr(own, mixture.scores_by)]
    correction = None if mixture.correction is None else at_path(module, mixture.correction)
    groups, top_groups = (1, 1) if mixture.groups is None else (getattr(own, name) for name in mixture.groups)
    renormalise = mixture.renormalise
    softcap = None if mixture.softcap is None else float(getattr(own, mixture.softcap))
    return Router(
        weight=linear.weight,
        bias=getattr(linear, "bias", None),
        correction=None if correction is None else correction.detach().float().flatten(),
        routing=Routing(
            top_k=own.top_k,
            scores=scores,
            renormalise=bool(getattr(own, renormalise)) if isinstance(renormalise, str) else renormalise,
            softcap=softcap if softcap and softcap > 0 else None,
            jitter=0.0 if mixture.jitter is None else float(getattr(own, mixture.jitter)),
            epsilon=mixture.epsilon,
            least_sum=0.0 if mixture.least_sum is None else float(getattr(own, mixture.least_sum)),
            factor=1.0 if mixture.factor is None else float(getattr(own, mixture.factor)),
            groups=groups or 1,
            top_groups=top_groups or 1,
        ),
        backend=backend,
        batch_invariant=batch_invariant,
    )
