"""A decoder layer over KV pages in nine kernels: norm, QKV, rotary and page write, attention, output projection;
norm, gate and up, activation, down projection. Both last projections add to the residual stream themselves. What other
parts a family has, its row says (`families.LayerParts`).

On a GPU, the products of steps of few tokens are our own, and the activation is part of one; so are all of them where
a token's results must not depend on the number of tokens (`invariant`).

With context parallelism a long step has some of its tokens on each rank, but around attention, where each has all of
them with some of the heads. In a short step every rank has all tokens, and computes its share of each product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from longreach_kernels.call import AttentionCall
from longreach_kernels.context_parallel import heads_to_tokens, packed_to_heads
from longreach_kernels.moe import Experts, experts_product
from torch import Tensor, nn

from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import LayerParts
from longreach_patches.fused.activation import BY_MODULE, Activation, gated_activation
from longreach_patches.fused.experts import experts_of
from longreach_patches.fused.modules import modules_of
from longreach_patches.fused.norm import Norm, normalize, normalize_all_heads
from longreach_patches.fused.project import Products
from longreach_patches.fused.residual import Residual
from longreach_patches.fused.rotary import rotate_and_write
from longreach_patches.fused.router import Router, router_of
from longreach_patches.fused.weights import (
    LayerWeights,
    Projection,
    in_blocks,
    projection_of,
    separated,
    share_of,
    whole_weights,
)
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.policy_step import step_attention

Choice = Callable[[Tensor], tuple[Tensor, Tensor]]  # as `Router.__call__`


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
        self.is_part = layout.size > 1
        self.in_use = True
        self._attention = attention
        self._parts = parts
        self._layout = layout
        self._backend = cast("str", attention.longreach_attention.backend.name)
        self._invariant = cast("bool", attention.longreach_attention.batch_invariant)
        self._products = Products(self._backend, self._invariant)
        self._index = cast("int", attention.layer_idx)
        self._is_last = is_last
        self._scale = cast("float", attention.scaling)
        self._softcap = modules.softcap
        self._sinks = modules.sinks
        if modules.sinks is not None:
            self._sinks = modules.sinks.detach().chunk(layout.context_size)[layout.context_rank]
        self._clip = modules.clip
        self._heads = attention.o_proj.in_features // attention.head_dim // layout.context_size
        self._rotary = rotary
        self._head_norms = modules.head_norms
        self._norms = modules.norms
        self._residual = Residual(self._products, modules.multiplier)
        self.router: Router | None = None
        self.experts: nn.Module | None = None
        self._mlp = modules.mlp
        self._shared_gate: Projection | None = None
        experts = None
        if modules.mixture is not None:
            mixture = parts.mixture
            assert mixture is not None
            self.router = router_of(modules.mixture, mixture, self._backend, self._invariant)
            self.experts = cast("nn.Module", getattr(modules.mixture, mixture.experts))
            experts = experts_of(self.experts, mixture)
            if mixture.shared is not None:
                self._mlp = getattr(modules.mixture, mixture.shared)
            if mixture.shared_gate is not None:
                self._shared_gate = projection_of(getattr(modules.mixture, mixture.shared_gate))
        self.choose: Choice | None = self.router
        self._whole = whole_weights(attention, self._mlp, layout, parts, experts)
        self._share = share_of(self._whole, layout)
        self._act_fn = cast("Callable[[Tensor], Tensor]", getattr(self._mlp, parts.activation, None))
        self._activation: Activation | None = BY_MODULE.get(type(self._act_fn).__name__)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], step: PagedStep) -> Tensor:
        """Add this layer to the residual stream `hidden` (1, n, C), in place; returns it.

        The n tokens are all T of the step, or this rank's (`RankLayout.token_sizes`). `rope` are the cosines and sines
        (1, T, R) of all positions. The last layer returns the R rows that are wanted, (1, R, C), if the step says so.
        """
        sizes = self._layout.token_sizes(step.slots.shape[0])
        weights = self._share if sizes is None else self._whole
        stream, shared, added = self._attend(hidden[0], rope, step, weights, sizes)
        if added is not None:
            norm, projection = self._norms.before_mlp, weights.gate_up
            assert norm is not None
            assert projection is not None
            gate_up = self._products.normed(stream, norm, projection, added, self._residual.multiplier)
            del added
            assert weights.down is not None
            self._residual.add_product(stream, gate_up, weights, weights.down, self._norms.after_mlp, self._activation)
        elif len(stream):
            self._transform(stream, shared, weights)
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
                joined: list[tuple[Projection | None, Any, tuple[str, ...]]] = [
                    (self._whole.qkv, self._attention, self._parts.qkv),
                    (self._whole.gate_up, self._mlp, self._parts.gate_up),
                ]
                for projection, module, names in joined:
                    if projection is not None:
                        parts = [getattr(module, name) for name in names]
                        stack.enter_context(separated(projection, ranks, *parts))
            yield

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
        norm, shared = self._norms.before_attention, None
        if sizes is None and not self._parts.parallel and self._products.joins_norm(stream, norm, weights.qkv):
            assert norm is not None
            qkv = self._products.normed(stream, norm, weights.qkv)
        else:
            x = self._normalized(stream, norm)
            qkv = self._products(x, weights.qkv) if sizes is None else self._own_heads(x, weights.qkv, sizes)
            shared = x if self._parts.parallel else None
            del x
        kv_scales = step.pages.scales[self._index]
        q = self._queries(qkv, rope, step)
        del qkv
        step.pages.bound_keys(self._index, step.slots_of(self._index), self._backend)
        if self._is_last and step.wanted is not None:
            rows = step.wanted.rows
            stream, q = stream[rows], q[rows]
            shared = shared if shared is None else shared[rows]
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
        if sizes is not None:
            out = heads_to_tokens(out, sizes, self._layout.context_group)
        if self._mlp_adds(stream, weights):
            return stream, None, self._products(out.flatten(1), weights.output)
        self._residual.add_product(stream, out.flatten(1), weights, weights.output, self._norms.after_attention)
        return stream, shared, None

    def _mlp_adds(self, stream: Tensor, weights: LayerWeights) -> bool:
        """Whether the kernel of the MLP's norm adds attention's product to the stream, and quantises its result."""
        if weights.gate_up is None or weights.down is None or weights.experts is not None or self._parts.parallel:
            return False
        if self._norms.after_attention is not None or weights.sum_over is not None or self._activation is None:
            return False
        joins = self._products.joins_norm(stream, self._norms.before_mlp, weights.gate_up)
        return joins and self._products.gates_late(stream, weights.down)

    def _queries(self, qkv: Tensor, rope: tuple[Tensor, Tensor], step: PagedStep) -> Tensor:
        """Queries (T, Hq, D), ready for attention; keys and values go to their pages."""
        if self._head_norms is not None and self._parts.qk_norm == "whole":
            normalize_all_heads(qkv, self._head_norms, self._backend)
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)
        return rotate_and_write(
            qkv,
            (rope[0][0], rope[1][0]) if self._rotary else None,
            step.pages.keys[self._index],
            step.pages.values[self._index],
            step.slots_of(self._index),
            heads=self._heads,
            rotary=self._parts.rotary,
            norms=self._head_norms if self._parts.qk_norm == "head" else None,
            kv_scales=step.pages.scales[self._index],
            backend=self._backend,
        )

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

    def _transform(self, stream: Tensor, shared: Tensor | None, weights: LayerWeights) -> None:
        """Add the MLP to `stream`."""
        x = self._normalized(stream, self._norms.before_mlp) if shared is None else shared
        norm = self._norms.after_mlp
        if weights.experts is not None:
            # The experts' sum goes where the MLP's does: to the stream, or to what is normalised first.
            total = self._sum_of_experts(x, weights.experts, self._residual.begin(stream, weights, norm))
            if weights.gate_up is None or weights.down is None:
                self._residual.finish(stream, total, weights, norm)
                return
        else:
            total = None
        assert weights.gate_up is not None
        assert weights.down is not None
        factor = None if self._shared_gate is None else self._products(x, self._shared_gate).sigmoid_()
        inner, gate = None, None
        if weights.blocks == 1 and self._activation is not None:
            if factor is None and self._products.gates_late(x, weights.down):
                gate = self._activation
            else:
                inner = self._products.gated(x, weights.gate_up, self._activation)
        if inner is None:
            inner = self._products(x, weights.gate_up)
            del x
            if gate is None:
                # Within a block gates come before what they gate; their products are in the channels' own order.
                by_block = inner.view(-1, inner.shape[1] // weights.blocks)
                inner = self._activate(by_block).view(stream.shape[0], -1)
                del by_block
        if factor is not None:
            inner.mul_(factor)
        if total is None:
            self._residual.add_product(stream, inner, weights, weights.down, norm, gate)
            return
        self._products.add(total, inner, weights.down, self._residual.multiplier if norm is None else 1.0, gate)
        self._residual.finish(stream, total, weights, norm)

    def _sum_of_experts(self, x: Tensor, experts: Experts, to: Tensor | None) -> Tensor:
        """What the chosen experts make of x, added to `to` with the layer's multiplier, or alone."""
        assert self.choose is not None
        return experts_product(
            x,
            *self.choose(x),
            experts,
            add_to=to,
            scale=1.0 if to is None else self._residual.multiplier,
            backend=self._backend,
            batch_invariant=self._invariant,
        )

    def _normalized(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else normalize(x, norm, self._backend)

    def _activate(self, gate_up: Tensor) -> Tensor:
        if self._activation is not None:
            return gated_activation(gate_up, self._activation, self._backend)
        gate, up = gate_up.chunk(2, -1)
        return self._act_fn(gate) * up
