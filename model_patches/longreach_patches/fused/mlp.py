"""What a fused layer has behind its second norm: an MLP with gates or without, a mixture of experts, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from longreach_kernels.moe import Experts, experts_product
from torch import Tensor

from longreach_patches.families import LayerParts
from longreach_patches.fused.activation import BY_MODULE, Activation, gated_activation
from longreach_patches.fused.modules import LayerModules, Norms, at_path
from longreach_patches.fused.norm import Norm, normalize
from longreach_patches.fused.project import Products
from longreach_patches.fused.residual import Residual
from longreach_patches.fused.weights import LayerWeights, Projection, projection_of

Choice = Callable[[Tensor], tuple[Tensor, Tensor]]  # as `Router.__call__`


@dataclass(frozen=True)
class Mlp:
    """Computes an MLP and experts, with the weights that a step has of them.

    Attributes:
        products: the layer's.
        residual: what it is added to.
        act_fn: the MLP's activation; `activation` is what our kernels call it, if they know it and there are gates.
        gated: whether the MLP has gates.
        gate: of the MLP beside experts, a projection to one number.
        experts_factor: of what experts give together.
    """

    products: Products
    residual: Residual
    act_fn: Callable[[Tensor], Tensor]
    activation: Activation | None
    gated: bool
    gate: Projection | None = None
    experts_factor: float = 1.0

    @classmethod
    def of(cls, modules: LayerModules, parts: LayerParts, products: Products) -> Mlp:
        """That of a layer with these modules."""
        act_fn = cast("Callable[[Tensor], Tensor]", getattr(modules.shared, parts.activation, None))
        known = BY_MODULE.get(type(act_fn).__name__) if parts.gated else None
        mixture, module = parts.mixture, modules.mixture
        if mixture is None or module is None:
            return cls(products, Residual(products, modules.multiplier), act_fn, known, parts.gated)
        halved = modules.shared is not None and mixture.halved is not None
        half = 0.5 if halved and at_path(module, cast("str", mixture.halved)) == "average" else 1.0
        gate = None if mixture.shared_gate is None else projection_of(getattr(module, mixture.shared_gate))
        factor = 1.0 if mixture.sum_factor is None else float(at_path(module, mixture.sum_factor))
        residual = Residual(products, half * modules.multiplier)
        return cls(products, residual, act_fn, known, parts.gated, gate, factor)

    def add_gated(self, stream: Tensor, gate_up: Tensor, weights: LayerWeights, norm: Norm | None) -> None:
        """Add to `stream` what gates and what they gate give."""
        assert weights.down is not None
        self.residual.add_product(stream, gate_up, weights, weights.down, norm, self.activation)

    def add(
        self, stream: Tensor, shared: Tensor | None, weights: LayerWeights, norms: Norms, choose: Choice | None
    ) -> None:
        """Add to `stream` (n, C), in place, what is made of its norm, or of what attention reads, too, `shared`."""
        x, norm = shared, norms.after_mlp
        if x is None:
            x = stream if norms.before_mlp is None else normalize(stream, norms.before_mlp, self.products.backend)
        total = None
        if weights.experts is not None:
            # The experts' sum goes where the MLP's does: to the stream, or to what is normalised first.
            assert choose is not None
            total = self._sum_of_experts(x, weights.experts, self.residual.begin(stream, weights, norm), choose)
            if weights.gate_up is None:
                self.residual.finish(stream, total, weights, norm)
                return
        up, down, known = weights.gate_up, weights.down, self.activation
        assert up is not None
        assert down is not None
        factor = None if self.gate is None else self.products(x, self.gate).sigmoid_()
        inner, late = None, None
        if weights.blocks == 1 and known is not None:
            if factor is None and self.products.gates_late(x, down):
                late = known
            else:
                inner = self.products.gated(x, up, known)
        if inner is None:
            inner = self.products(x, up)
            del x  # where memory is highest
            inner = inner if late is not None else self._activate(inner, weights.blocks)
        if factor is not None:
            inner.mul_(factor)
        if total is None:
            self.residual.add_product(stream, inner, weights, down, norm, late)
            return
        self.products.add(total, inner, down, self.residual.multiplier if norm is None else 1.0, late)
        self.residual.finish(stream, total, weights, norm)

    def _activate(self, inner: Tensor, blocks: int) -> Tensor:
        """The inner channels of a product with `blocks` ranks' weights."""
        if not self.gated:
            return self.act_fn(inner)
        # Within a block gates come before what they gate; their products are in the channels' own order.
        by_block = inner.view(-1, inner.shape[1] // blocks)
        if self.activation is not None:
            return gated_activation(by_block, self.activation, self.products.backend).view(len(inner), -1)
        gate, up = by_block.chunk(2, -1)
        return (self.act_fn(gate) * up).view(len(inner), -1)

    def _sum_of_experts(self, x: Tensor, experts: Experts, to: Tensor | None, choose: Choice) -> Tensor:
        """What the chosen experts make of x, added to `to` with the layer's multiplier, or alone."""
        return experts_product(
            x,
            *choose(x),
            experts,
            add_to=to,
            scale=self.experts_factor * (1.0 if to is None else self.residual.multiplier),
            backend=self.products.backend,
            batch_invariant=self.products.batch_invariant,
        )
