"""A decoder layer with a recurrent state in place of attention: the norm, one product for queries, keys, values and
gates, one for decays, what `gated_delta.mix` makes of these, and the last projection, which adds to the stream.
What is behind the second norm is that of other fused layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import DeltaParts, LayerParts
from longreach_patches.fused.layer import FusedLayer
from longreach_patches.fused.modules import modules_of
from longreach_patches.fused.project import Products
from longreach_patches.fused.weights import LayerWeights, joined, projection_of
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.mixers import MIXER, Mixer
from longreach_patches.mixers.gated_delta import mix, split


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
        how = cast("Mixer[DeltaParts]", getattr(module, MIXER))
        experts = self._begin(modules, parts, layout, Products(how.backend, batch_invariant=False), is_last)
        self._module, self._how = module, how
        names = how.parts
        wide = names.qkv if names.by_key_head else (*names.qkv, names.gate)
        numbers = (names.beta,) if names.by_key_head else (names.beta, names.decay)
        self._numbers = joined(1, *(getattr(module, name) for name in numbers))
        mlp = modules.shared
        self._whole = self._share = LayerWeights(
            qkv=joined(1, *(getattr(module, name) for name in wide)),
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
        inputs = split(
            self._module, self._how.parts, [self._products(x, weights.qkv)], [self._products(x, self._numbers)]
        )
        out = mix(self._module, self._how, inputs, step)
        if self._is_last and step.wanted is not None:
            rows = step.wanted.rows
            stream, out = stream[rows], out[rows]
        if len(stream):
            self._residual.add_product(stream, out, weights, weights.output, self._norms.after_attention)
        return stream, None, None
