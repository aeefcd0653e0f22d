"""A decoder layer with a recurrent state in place of attention: the norm, one product for queries, keys, values and
gates, one for decays, what `gated_delta.mix` makes of these, and the last projection, which adds to the stream.
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
from longreach_patches.fused.weights import LayerWeights, Projection, in_blocks, joined, projection_of, share_of
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
        self._wide_names, self._number_names = how.parts.wide, how.parts.numbers
        wide, self._numbers = (
            joined(ranks, *(getattr(module, name) for name in names), segments=[inputs[name] for name in names])
            for names in (self._wide_names, self._number_names)
        )
        self._share_of_numbers = in_blocks(self._numbers, ranks)[layout.context_rank] if ranks > 1 else self._numbers
        mlp = modules.shared
        self._whole = LayerWeights(
            qkv=wide,
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
        return [(self._whole.qkv, self._module, self._wide_names), (self._numbers, self._module, self._number_names)]

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
        numbers = self._share_of_numbers if sizes is None else self._numbers
        products = (self._products(x, projection) for projection in (weights.qkv, numbers))
        if sizes is not None:  # of all ranks' heads, rank by rank
            products = (product.unflatten(1, (ranks, -1)).flatten(0, 1) for product in products)
        wide, narrow = products
        inputs = split(self._module, self._how.parts, [wide], [narrow], ranks)
        exchange = None if sizes is None else HeadExchange(self._layout, sizes)
        out = mix(self._module, self._how, inputs, step, exchange)
        if self._is_last and step.wanted is not None:
            rows = step.wanted.rows
            stream, out = stream[rows], out[rows]
        if len(stream):
            self._residual.add_product(stream, out, weights, weights.output, self._norms.after_attention)
        return stream, None, None
