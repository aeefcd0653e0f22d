"""A decoder layer with a recurrent state in place of attention: the norm, one product for queries, keys, values, gates
and decays, what `gated_delta.mix` makes of these, and the last projection, which adds to the stream. Where the first
have a format and decays have none, these are a product of their own.
What is behind the second norm is that of other fused layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import LayerParts
from longreach_patches.fused.layer import FusedLayer
from longreach_patches.fused.modules import modules_of
from longreach_patches.fused.project import Products
from longreach_patches.fused.weights import LayerWeights, joined, projection_of, weight_of
from longreach_patches.gated_delta import MIXER, Mixer, mix, split
from longreach_patches.layout import SINGLE, RankLayout


class DeltaLayer(FusedLayer):
    """Computes what a layer with a gated delta rule computes, as `FusedLayer` does for one that attends."""

    def __init__(
        self, layer: nn.Module, parts: LayerParts, mixer: str, layout: RankLayout = SINGLE, *, is_last: bool = False
    ) -> None:
        """Join the projections of `layer`, whose module `mixer` is patched.

        Raises:
            UnsupportedModelError: the layer is not made of these parts, or there are several ranks.
        """
        if layout.size > 1:
            raise UnsupportedModelError(f"{type(layer).__name__} keeps a state, which fused layers do not split")
        modules = modules_of(layer, parts, mixer)
        module = cast("nn.Module", modules.attention)
        how = cast("Mixer", getattr(module, MIXER))
        experts = self._begin(modules, parts, layout, Products(how.backend, batch_invariant=False), is_last)
        self._module, self._how = module, how
        names = how.parts
        wide = names.qkv if names.by_key_head else (*names.qkv, names.gate)
        numbers = (names.beta,) if names.by_key_head else (names.beta, names.decay)
        wide, numbers = ([getattr(module, name) for name in of] for of in (wide, numbers))
        # One product for all that is published in one dtype. Numbers of weights with a format are apart.
        self._count = 2 * cast("Any", module).num_v_heads if _alike(*wide, *numbers) else 0
        self._numbers = None if self._count else joined(1, *numbers)
        mlp = modules.shared
        self._whole = self._share = LayerWeights(
            qkv=joined(1, *wide, *(numbers if self._count else [])),
            output=projection_of(getattr(module, names.out)),
            gate=None,
            gate_up=mlp and joined(1, *(getattr(mlp, name) for name in parts.gate_up)),
            down=mlp and projection_of(getattr(mlp, parts.down)),
            experts=experts,
            blocks=1,
            sum_over=None,
            adds_stream=True,
        )

    def _attend(
        self,
        stream: Tensor,
        rope: tuple[Tensor, Tensor],
        step: PagedStep,
        weights: LayerWeights,
        sizes: Sequence[int] | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Add what the mixer gives to `stream`, or to a copy of its wanted rows; returns that, as `FusedLayer` does."""
        x = self._normalized(stream, self._norms.before_attention)
        made = self._products(x, weights.qkv)
        if self._numbers is None:
            made, numbers = made[:, : -self._count], made[:, -self._count :]
        else:
            numbers = self._products(x, self._numbers)
        out = mix(self._module, self._how, split(self._module, self._how.parts, [made], [numbers]), step)
        if self._is_last and step.wanted is not None:
            rows = step.wanted.rows
            stream, out = stream[rows], out[rows]
        if len(stream):
            self._residual.add_product(stream, out, weights, weights.output, self._norms.after_attention)
        return stream, None, None


def _alike(*projections: Any) -> bool:
    """Whether projections are tensors of one dtype, all with a bias or none."""
    weights = [weight_of(projection) for projection in projections]
    kinds = {(x.dtype, one.bias is None) for x, one in zip(weights, projections, strict=True) if isinstance(x, Tensor)}
    return len(kinds) == 1 and all(isinstance(x, Tensor) for x in weights)
