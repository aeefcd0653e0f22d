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
from contextlib import contextmanager
from typing import cast

import torch
from longreach_kernels.call import AttentionCall
from longreach_kernels.context_parallel import heads_to_tokens, packed_to_heads
from torch import Tensor, distributed, nn

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import LayerParts
from longreach_patches.fused.activation import BY_MODULE, Activation, gated_activation
from longreach_patches.fused.dispatch import MAX_ROWS, uses_triton
from longreach_patches.fused.modules import modules_of
from longreach_patches.fused.norm import Norm, normalize, normalize_all_heads
from longreach_patches.fused.rotary import rotate_and_write
from longreach_patches.fused.weights import LayerWeights, Projection, in_blocks, separated, share_of, whole_weights
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.pages import PagedStep
from longreach_patches.policy_step import step_attention

Product = Callable[..., Tensor]  # as `product`


class FusedLayer:
    """Computes what a decoder layer computes, with its own weights, as the parts of its family say.

    Projections of the same input are joined: the layer's parameters become views of one matrix, so that nothing is held
    twice and the layer's own forward stays as it was. On context ranks it needs
    `own_weights`.

    Attributes:
        is_part: whether the weights are one rank's part.
        in_use: False while the layer's own forward is asked what it computes.
        own_mlp: the model's own module, called with (1, n, C), where no weights of an MLP are used.
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
        self.own_mlp: Callable[[Tensor], Tensor] | None = modules.own_mlp
        self._attention = attention
        self._mlp = modules.mlp
        self._parts = parts
        self._layout = layout
        self._backend = cast("str", attention.longreach_attention.backend.name)
        self._invariant = cast("bool", attention.longreach_attention.batch_invariant)
        self._index = cast("int", attention.layer_idx)
        self._is_last = is_last
        self._scale = cast("float", attention.scaling)
        self._softcap = modules.softcap
        self._heads = attention.o_proj.in_features // attention.head_dim // layout.context_size
        self._rotary = rotary
        self._head_norms = modules.head_norms
        self._norms = modules.norms
        self._multiplier = modules.multiplier
        self._whole = whole_weights(attention, modules.mlp, layout, parts)
        self._share = share_of(self._whole, layout)
        self._act_fn = cast("Callable[[Tensor], Tensor]", getattr(modules.mlp, parts.activation, None))
        self._activation: Activation | None = BY_MODULE.get(type(self._act_fn).__name__)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], step: PagedStep) -> Tensor:
        """Add this layer to the residual stream `hidden` (1, n, C), in place; returns it.

        The n tokens are all T of the step, or this rank's (`RankLayout.token_sizes`). `rope` are the cosines and sines
        (1, T, R) of all positions. The last layer returns the R rows that are wanted, (1, R, C), if the step says so.
        """
        sizes = self._layout.token_sizes(step.slots.shape[0])
        weights = self._share if sizes is None else self._whole
        stream, shared = self._attend(hidden[0], rope, step, weights, sizes)
        if len(stream):
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
        if ranks == 1:  # they are views of the joined
            yield
            return
        assert self._whole.gate_up is not None, "layers with experts are not split over ranks"
        qkv = [getattr(self._attention, name) for name in self._parts.qkv]
        gate_up = [getattr(self._mlp, name) for name in self._parts.gate_up]
        with separated(self._whole.qkv, ranks, *qkv), separated(self._whole.gate_up, ranks, *gate_up):
            yield

    def _own_product(self, stream: Tensor) -> Product | None:
        """Which of our products computes a step of these rows; None for the matrix library's."""
        if self._invariant:
            from longreach_patches.fused.invariant import invariant_product

            return invariant_product
        if stream.shape[0] > MAX_ROWS or not uses_triton(stream, self._backend):
            return None
        from longreach_patches.fused.products import product

        return product

    def _attend(
        self,
        stream: Tensor,
        rope: tuple[Tensor, Tensor],
        step: PagedStep,
        weights: LayerWeights,
        sizes: Sequence[int] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Add attention to `stream`, or to a copy of its wanted rows; returns what it was added to, and what the MLP
        reads of the same rows, if attention reads that, too."""
        own = self._own_product(stream)
        x = self._normalized(stream, self._norms.before_attention)
        if sizes is not None:
            qkv = self._own_heads(x, weights.qkv, sizes)
        else:
            qkv = (own or nn.functional.linear)(x, *weights.qkv)
        shared = x if self._parts.parallel else None
        del x
        kv_scales = step.pages.scales[self._index]
        q = self._queries(qkv, rope, step)
        del qkv
        step.pages.bound_keys(self._index, step.slots, self._backend)
        if self._is_last and step.wanted is not None:
            rows = step.wanted.rows
            stream, q = stream[rows], q[rows]
            shared = shared if shared is None else shared[rows]
            if not len(rows):
                return stream, shared
            step, own = step.of_wanted(), self._own_product(stream)
        call = AttentionCall(
            self._attention.longreach_attention.mask,
            self._scale,
            self._softcap,
            kv_scales=kv_scales,
            batch_invariant=self._invariant,
        )
        out = step_attention(q, self._index, step, call, self._backend)
        if sizes is not None:
            out = heads_to_tokens(out, sizes, self._layout.context_group)
        self._add_product(stream, out.flatten(1), weights, weights.output, self._norms.after_attention, own)
        return stream, shared

    def _queries(self, qkv: Tensor, rope: tuple[Tensor, Tensor], step: PagedStep) -> Tensor:
        """Queries (T, Hq, D), ready for attention; keys and values go to their pages."""
        if self._head_norms is not None and self._parts.qk_norm == "whole":
            normalize_all_heads(qkv, self._head_norms, self._backend)
        return rotate_and_write(
            qkv,
            (rope[0][0], rope[1][0]) if self._rotary else None,
            step.pages.keys[self._index],
            step.pages.values[self._index],
            step.slots,
            heads=self._heads,
            rotary=self._parts.rotary,
            norms=self._head_norms if self._parts.qk_norm == "head" else None,
            kv_scales=step.pages.scales[self._index],
            backend=self._backend,
        )

    def _own_heads(self, x: Tensor, qkv: Projection, sizes: Sequence[int]) -> Tensor:
        """Queries, keys and values of this rank's heads for all T tokens, (T, outputs / R), from its own x (n, C)."""
        ranks = len(sizes)
        send = x.new_empty(ranks, x.shape[0], qkv.weight.shape[0] // ranks)
        for place, block in zip(send, in_blocks(qkv, ranks), strict=True):
            torch.mm(x, block.weight.t(), out=place)
            if block.bias is not None:
                place.add_(block.bias)
        return packed_to_heads(send, sizes, self._layout.context_group)

    def _transform(self, stream: Tensor, shared: Tensor | None, weights: LayerWeights) -> None:
        """Add the MLP to `stream`."""
        x = self._normalized(stream, self._norms.before_mlp) if shared is None else shared
        if weights.gate_up is None or weights.down is None:
            assert self.own_mlp is not None
            self._add(stream, self.own_mlp(x[None])[0], self._norms.after_mlp)
            return
        own = self._own_product(stream)
        if own is not None and self._activation is not None:
            inner = own(x, *weights.gate_up, gated=True, activation=self._activation)
        else:
            gate_up = (own or nn.functional.linear)(x, *weights.gate_up)
            del x
            # Within a block gates come before what they gate; their products are in the channels' own order.
            by_block = gate_up.view(-1, gate_up.shape[1] // weights.blocks)
            inner = self._activate(by_block).view(stream.shape[0], -1)
            del gate_up, by_block
        self._add_product(stream, inner, weights, weights.down, self._norms.after_mlp, own)

    def _add_product(
        self,
        stream: Tensor,
        x: Tensor,
        weights: LayerWeights,
        projection: Projection,
        norm: Norm | None,
        own: Product | None,
    ) -> None:
        """stream += norm(projection(x)), summed over the ranks that each have a part of the projection's inputs."""
        if norm is not None:
            product = (own or nn.functional.linear)(x, *projection)
            if weights.sum_over is not None:
                distributed.all_reduce(product, group=weights.sum_over)
            self._add(stream, product, norm)
            return
        # The stream is the same on all of them, and must be in the sum once.
        if not (weights.sum_over is None or weights.adds_stream):
            stream.zero_()
        _add_product(stream, x, projection, own, self._multiplier)
        if weights.sum_over is not None:
            distributed.all_reduce(stream, group=weights.sum_over)

    def _add(self, stream: Tensor, x: Tensor, norm: Norm | None) -> None:
        """stream += norm(x)"""
        if norm is None:
            stream.add_(x, alpha=self._multiplier)
        else:
            normalize(x, norm, self._backend, add_to=stream, scale=self._multiplier)

    def _normalized(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else normalize(x, norm, self._backend)

    def _activate(self, gate_up: Tensor) -> Tensor:
        if self._activation is not None:
            return gated_activation(gate_up, self._activation, self._backend)
        gate, up = gate_up.chunk(2, -1)
        return self._act_fn(gate) * up


def _add_product(stream: Tensor, x: Tensor, projection: Projection, own: Product | None, scale: float) -> None:
    """stream += scale * projection(x): the product's kernel adds, so the sum costs no pass of its own and is rounded
    once."""
    if own is not None:
        own(x, projection.weight, bias=projection.bias, add_to=stream, scale=scale)
        return
    stream.addmm_(x, projection.weight.t(), alpha=scale)
    if projection.bias is not None:
        stream.add_(projection.bias, alpha=scale)
