"""A decoder layer over KV pages in nine kernels: norm, QKV, rotary and page write, attention, output projection;
norm, gate and up, activation, down projection. Both last projections add to the residual stream themselves. What other
parts a family has, its row says (`families.LayerParts`).

On a GPU, the products of steps of few tokens are our own, and the activation is part of one; so are all of them where
a token's results must not depend on the number of tokens (`invariant`).

With context parallelism a long step has some of its tokens on each rank, but around attention, where each has all of
them with some of the heads. In a short step every rank has all tokens, and computes its share of each product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from longreach_kernels.call import AttentionCall
from longreach_kernels.context_parallel import heads_to_tokens, packed_to_heads
from longreach_kernels.moe import Experts
from torch import Tensor, nn

from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import LayerParts
from longreach_patches.fused.experts import experts_of
from longreach_patches.fused.mlp import Choice, Mlp
from longreach_patches.fused.modules import LayerModules, modules_of
from longreach_patches.fused.norm import Norm, normalize, normalize_all_heads
from longreach_patches.fused.output_gate import gate_heads
from longreach_patches.fused.project import Products
from longreach_patches.fused.residual import Residual
from longreach_patches.fused.rotary import QueryGrowth, rotate_and_write
from longreach_patches.fused.router import Router, router_of
from longreach_patches.fused.weights import (
    LayerWeights,
    Projection,
    in_blocks,
    separated,
    share_of,
    whole_weights,
)
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.policy_step import step_attention


class FusedLayer:
    """Computes what a decoder layer computes, with its own weights, as the parts of its family say.

    Projections of the same input are joined: the layer's parameters become views of one matrix, so that nothing is held
    twice and the layer's own forward stays as it was. On context ranks it needs
    `own_weights`.

    Attributes:
        is_part: whether the weights are one rank's part.
        in_use: False while the layer's own forward is asked what it computes.
        router: of a mixture of experts; None where the MLP is a gated one.
        choose: what a step's tokens choose their experts by; the router, but while it is replaced.
        experts: the model's own module, which is called as module(x, experts, weights) by its own mixture.
    """

    def __init__(
        self,
        layer: nn.Module,
        parts: LayerParts,
        layout: RankLayout = SINGLE,
        *,
        rotary: bool = True,
        is_last: bool = False,
    ) -> None:
        """Join the projections of `layer`, whose weights are those of `layout`'s rank. `rotary` says whether it turns
        queries and keys by their positions.

        Raises:
            UnsupportedModelError: the layer is not made of these parts, or several ranks cannot compute them.
        """
        if layout.size > 1 and parts.whole is not None:
            raise UnsupportedModelError(f"{type(layer).__name__} has {parts.whole}, which are not split over ranks")
        modules = modules_of(layer, parts)
        attention = modules.attention
        of_layer = attention.longreach_attention
        self._attention = attention
        experts = self._begin(
            modules, parts, layout, Products(of_layer.backend.name, of_layer.batch_invariant), is_last
        )
        self._index = cast("int", of_layer.index)
        self._scale = cast("float", attention.scaling)
        self._softcap = modules.softcap
        self._sinks = modules.sinks
        if modules.sinks is not None:
            self._sinks = modules.sinks.detach().chunk(layout.context_size)[layout.context_rank]
        self._clip = modules.clip
        self._growth = modules.growth
        width = getattr(attention, parts.output).in_features
        self._heads = width // attention.head_dim // layout.context_size
        self._rotary = rotary
        self._head_norms = modules.head_norms
        self._whole = whole_weights(attention, modules.shared, layout, parts, experts)
        self._share = share_of(self._whole, layout)

    def _begin(
        self, modules: LayerModules, parts: LayerParts, layout: RankLayout, products: Products, is_last: bool
    ) -> Experts | None:
        """Take what is not of attention; returns the experts of a mixture."""
        self.is_part = layout.size > 1
        self.in_use = True
        self._parts = parts
        self._layout = layout
        self._products = products
        self._backend, self._invariant = products.backend, products.batch_invariant
        self._is_last = is_last
        self._growth: QueryGrowth | None = None
        self._norms = modules.norms
        self._residual = Residual(products, modules.multiplier)
        self._mlp = Mlp.of(modules, parts, products)
        self._mlp_module = modules.shared
        self.router: Router | None = None
        self.experts: nn.Module | None = None
        experts = None
        if modules.mixture is not None:
            mixture = parts.mixture
            assert mixture is not None
            self.router = router_of(modules.mixture, mixture, self._backend, self._invariant)
            self.experts = cast("nn.Module", getattr(modules.mixture, mixture.experts))
            experts = experts_of(self.experts, mixture)
        self.choose: Choice | None = self.router
        return experts

    def __call__(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], step: PagedStep, positions: Tensor | None = None
    ) -> Tensor:
        """Add this layer to the residual stream `hidden` (1, n, C), in place; returns it.

        The n tokens are all T of the step, or this rank's (`RankLayout.token_sizes`). `rope` are the cosines and sines
        (1, T, R) of all positions, and `positions` (1, T) these, for families whose queries grow with them. The last
        layer returns the R rows that are wanted, (1, R, C), if the step says so.
        """
        sizes = self._layout.token_sizes(step.slots.shape[0])
        weights = self._share if sizes is None else self._whole
        if self._growth is not None:
            assert positions is not None, "its queries grow with their positions"
            self._growth = self._growth._replace(positions=positions[0])
        stream, shared, added = self._attend(hidden[0], rope, step, weights, sizes)
        if added is not None:
            norm, projection = self._norms.before_mlp, weights.gate_up
            assert norm is not None
            assert projection is not None
            gate_up = self._products.normed(stream, norm, projection, added, self._residual.multiplier)
            del added
            self._mlp.add_gated(stream, gate_up, weights, self._norms.after_mlp)
        elif len(stream):
            self._mlp.add(stream, shared, weights, self._norms, self.choose)
        return stream[None]

    @property
    def layout(self) -> RankLayout:
        """Which part of the layer this is."""
        return self._layout

    @contextmanager
    def own_weights(self) -> Iterator[None]:
        """Let the layer's own forward compute; context ranks' projections get back what joining took from them."""
        ranks = self._layout.context_size
        with ExitStack() as stack:
            if ranks > 1:  # else they are views of the joined
                joined = [*self._joined(), (self._whole.gate_up, self._mlp_module, self._parts.gate_up)]
                for projection, module, names in joined:
                    if projection is not None and len(names) > 1:
                        parts = [getattr(module, name) for name in names]
                        stack.enter_context(separated(projection, ranks, *parts))
            yield

    def _joined(self) -> list[tuple[Projection | None, Any, tuple[str, ...]]]:
        """The joined projections before attention, with the module that has them and their names."""
        return [(self._whole.qkv, self._attention, self._parts.qkv)]

    def _attend(
        self,
        stream: Tensor,
        rope: tuple[Tensor, Tensor],
        step: PagedStep,
        weights: LayerWeights,
        sizes: Sequence[int] | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Add attention to `stream`, or to a copy of its wanted rows; returns what it was added to, and what the MLP
        reads of the same rows, if attention reads that, too. Where the kernel of the MLP's norm adds it, attention's
        product is returned last."""
        norm, shared, gate = self._norms.before_attention, None, None
        alone = not self._parts.parallel and weights.gate is None
        if sizes is None and alone and self._products.joins_norm(stream, norm, weights.qkv):
            assert norm is not None
            qkv = self._products.normed(stream, norm, weights.qkv)
        else:
            x = self._normalized(stream, norm)
            qkv = self._products(x, weights.qkv) if sizes is None else self._own_heads(x, weights.qkv, sizes)
            gate = None if weights.gate is None else self._products(x, weights.gate)
            shared = x if self._parts.parallel else None
            del x
        kv_scales = step.pages.scales[self._index]
        q = self._queries(qkv, rope, step)
        if self._parts.gated_queries:
            gate = self._by_head(qkv)[:, 1 : 2 * self._heads : 2]
        del qkv
        step.pages.bound_keys(self._index, step.slots_of(self._index), self._backend)
        if self._is_last and step.wanted is not None:
            rows = step.wanted.rows
            stream, q = stream[rows], q[rows]
            shared, gate = (x if x is None else x[rows] for x in (shared, gate))
            if not len(rows):
                return stream, shared, None
            step = step.of_wanted()
        call = AttentionCall(
            self._attention.longreach_attention.mask,
            self._scale,
            self._softcap,
            self._sinks,
            kv_scales=kv_scales,
            batch_invariant=self._invariant,
        )
        out = step_attention(q, self._index, step, call, self._backend)
        if self._parts.gated_queries:  # these gates come with a rank's heads, and others with its tokens
            assert gate is not None
            out, gate = gate_heads(out, gate, None), None
        if sizes is not None:
            out = heads_to_tokens(out, sizes, self._layout.context_group)
        if gate is not None:
            out = gate_heads(out, gate, self._parts.output_gate)
        if self._mlp_adds(stream, weights):
            return stream, None, self._products(out.flatten(1), weights.output)
        self._residual.add_product(stream, out.flatten(1), weights, weights.output, self._norms.after_attention)
        return stream, shared, None

    def _mlp_adds(self, stream: Tensor, weights: LayerWeights) -> bool:
        """Whether the kernel of the MLP's norm adds attention's product to the stream, and quantises its result."""
        if weights.gate_up is None or weights.down is None or weights.experts is not None or self._parts.parallel:
            return False
        if self._norms.after_attention is not None or weights.sum_over is not None or self._mlp.activation is None:
            return False
        joins = self._products.joins_norm(stream, self._norms.before_mlp, weights.gate_up)
        return joins and self._products.gates_late(stream, weights.down)

    def _queries(self, qkv: Tensor, rope: tuple[Tensor, Tensor], step: PagedStep) -> Tensor:
        """Queries (T, Hq, D), ready for attention; keys and values go to their pages."""
        if self._head_norms is not None and self._parts.qk_norm == "whole":
            normalize_all_heads(qkv, self._head_norms, self._backend)
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)
        gated = self._parts.gated_queries  # gates are turned along with queries, and left out
        q = rotate_and_write(
            qkv,
            (rope[0][0], rope[1][0]) if self._rotary else None,
            step.pages.keys[self._index],
            step.pages.values[self._index],
            step.slots_of(self._index),
            heads=2 * self._heads if gated else self._heads,
            rotary=self._parts.rotary,
            norms=self._head_norms if self._parts.qk_norm != "whole" else None,
            norms_last=self._parts.qk_norm == "turned_head",
            growth=self._growth,
            kv_scales=step.pages.scales[self._index],
            backend=self._backend,
        )
        return q[:, ::2].contiguous() if gated else q

    def _by_head(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values of all heads, (T, H, D)."""
        return qkv.unflatten(1, (-1, self._attention.head_dim))

    def _own_heads(self, x: Tensor, qkv: Projection, sizes: Sequence[int]) -> Tensor:
        """Queries, keys and values of this rank's heads for all T tokens, (T, outputs / R), from its own x (n, C)."""
        ranks = len(sizes)
        send = x.new_empty(ranks, x.shape[0], qkv.outputs // ranks)
        for place, block in zip(send, in_blocks(qkv, ranks), strict=True):
            if not isinstance(block.weight, Tensor):
                place.copy_(self._products(x, block))
                continue
            torch.mm(x, block.weight.t(), out=place)
            if block.bias is not None:
                place.add_(block.bias)
        return packed_to_heads(send, sizes, self._layout.context_group)

    def _normalized(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else normalize(x, norm, self._backend)
