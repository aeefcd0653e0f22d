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
from longreach_patches.families import DeltaParts, LayerParts
from longreach_patches.fused.layer import FusedLayer
from longreach_patches.fused.modules import modules_of
from longreach_patches.fused.project import Products
from longreach_patches.fused.weights import (
    LayerWeights,
    Projection,
    in_blocks,
    joined,
    projection_of,
    share_of,
    weight_of,
)
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.mixer_split import split_of
from longreach_patches.mixers import MIXER, Mixer
from longreach_patches.mixers.exchange import HeadExchange
from longreach_patches.mixers.gated_delta import mix, split


class DeltaLayer(FusedLayer):
    """Computes what a layer with a gated delta rule computes, as `FusedLayer` does for one that attends."""

    def __init__(
        self, layer: nn.Module, parts: LayerParts, mixer: str, layout: RankLayout = SINGLE, *, is_last: bool = False
    ) -> None:
        """Join the projections of `layer`, whose module `mixer` is patched, and whose weights are those of `layout`'s
        rank.

        Raises:
            UnsupportedModelError: the layer is not made of these parts, or several ranks cannot compute them.
        """
        modules = modules_of(layer, parts, mixer)
        module = cast("nn.Module", modules.attention)
        how = cast("Mixer[DeltaParts]", getattr(module, MIXER))
        experts = self._begin(modules, parts, layout, Products(how.backend, batch_invariant=False), is_last)
        self._module, self._how = module, how
        ranks, inputs = layout.context_size, split_of(module, how.parts).inputs
        wide, numbers = how.parts.wide, how.parts.numbers
        # One product for all that is published in one dtype. Numbers of weights with a format are apart.
        self._count, self._numbers = 0, None
        if _alike(*(getattr(module, name) for name in (*wide, *numbers))):
            wide, numbers = (*wide, *numbers), ()
            self._count = 2 * cast("Any", module).num_v_heads // ranks
        self._names = wide, numbers

        def together(names: Sequence[str]) -> Projection:
            segments = [inputs[name] for name in names]
            return joined(ranks, *(getattr(module, name) for name in names), segments=segments)

        if numbers:
            self._numbers = together(numbers)
            self._share_of_numbers = self._numbers
            if ranks > 1:
                self._share_of_numbers = in_blocks(self._numbers, ranks)[layout.context_rank]
        mlp = modules.shared
        self._whole = LayerWeights(
            qkv=together(wide),
            output=projection_of(getattr(module, how.parts.out)),
            gate=None,
            gate_up=mlp and joined(ranks, *(getattr(mlp, name) for name in parts.gate_up)),
            down=mlp and projection_of(getattr(mlp, parts.down)),
            experts=experts,
            blocks=ranks,
            sum_over=layout.tensor_group if layout.tensor_size > 1 else None,
            adds_stream=layout.tensor_rank == 0,
        )
        self._share = share_of(self._whole, layout)

    def _joined(self) -> list[tuple[Projection | None, Any, tuple[str, ...]]]:
        wide, numbers = self._names
        return [(self._whole.qkv, self._module, wide), (self._numbers, self._module, numbers)]

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
        ranks = self._layout.context_size
        made = self._by_rank(self._products(x, weights.qkv), sizes)
        if self._numbers is None:
            made, numbers = made[:, : -self._count], made[:, -self._count :]
        else:
            numbers = self._share_of_numbers if sizes is None else self._numbers
            numbers = self._by_rank(self._products(x, numbers), sizes)
        inputs = split(self._module, self._how.parts, [made], [numbers], ranks)
        exchange = None if sizes is None else HeadExchange(self._layout, sizes)
        out = mix(self._module, self._how, inputs, step, exchange)
        if self._is_last and step.wanted is not None:
            rows = step.wanted.rows
            stream, out = stream[rows], out[rows]
        if len(stream):
            self._residual.add_product(stream, out, weights, weights.output, self._norms.after_attention)
        return stream, None, None

    def _by_rank(self, made: Tensor, sizes: Sequence[int] | None) -> Tensor:
        """Outputs of all ranks' heads as a row for each rank."""
        return made if sizes is None else made.unflatten(1, (self._layout.context_size, -1)).flatten(0, 1)


def _alike(*projections: Any) -> bool:
    """Whether projections are tensors of one dtype, all with a bias or none."""
    weights = [weight_of(projection) for projection in projections]
    kinds = {(x.dtype, one.bias is None) for x, one in zip(weights, projections, strict=True) if isinstance(x, Tensor)}
    return len(kinds) == 1 and all(isinstance(x, Tensor) for x in weights)
