"""A decoder layer over KV pages in nine kernels: norm, QKV, rotary and page write, attention, output projection;
norm, gate and up, activation, down projection. Both last projections add to the residual stream themselves.

On a GPU, the products of steps of few tokens are our own, and the activation is part of one; so are all of them where
a token's results must not depend on the number of tokens (`invariant`).

With context parallelism a long step has some of its tokens on each rank, but around attention, where each has all of
them with some of the heads. In a short step every rank has all tokens, and computes its share of each product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from longreach_kernels.call import AttentionCall
from longreach_kernels.context_parallel import heads_to_tokens, packed_to_heads
from torch import Tensor, distributed, nn

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.fused.activation import silu_mul
from longreach_patches.fused.dispatch import MAX_ROWS, uses_triton
from longreach_patches.fused.norm import rms_norm
from longreach_patches.fused.rotary import HeadNorms, rotate_and_write
from longreach_patches.fused.weights import LayerWeights, Projection, in_blocks, separated, share_of, whole_weights
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.pages import PagedStep
from longreach_patches.policy_step import step_attention

Product = Callable[..., Tensor]  # as `product`
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedLayer:
    """Computes what a decoder layer of the supported families computes, with its own weights.

    Projections of the same input are joined: the layer's parameters become views of one matrix, so that nothing is held
    twice and the layer's own forward stays as it was. With several ranks there is no forward of its own any more.
    """

    def __init__(self, layer: nn.Module, layout: RankLayout = SINGLE, *, is_last: bool = False) -> None:
        """Join the projections of `layer`, whose weights are those of `layout`'s rank.

        Raises:
            UnsupportedModelError: the layer is not made as those of the supported families.
        """
        attention, mlp = _parts(layer)
        self._attention = attention
        self._mlp = mlp
        self.is_part = layout.size > 1
        self.in_use = True  # off while the layer's own forward is asked what it computes
        self._layout = layout
        self._backend = cast("str", attention.longreach_attention.backend.name)
        self._invariant = cast("bool", attention.longreach_attention.batch_invariant)
        self._index = cast("int", attention.layer_idx)
        self._is_last = is_last
        self._scale = cast("float", attention.scaling)
        self._heads = attention.o_proj.in_features // attention.head_dim // layout.context_size
        # SmolLM3 does not encode positions in some layers.
        self._rope = bool(getattr(attention, "use_rope", True))
        self._head_norms = None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = attention.q_norm, attention.k_norm
            self._head_norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.variance_epsilon)
        self._whole = whole_weights(attention, mlp, layout)
        self._share = share_of(self._whole, layout)
        self._silu = type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")  # torch's or transformers' own
        self._input_norm = layer.input_layernorm
        self._post_norm = layer.post_attention_layernorm

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], step: PagedStep) -> Tensor:
        """Add this layer to the residual stream `hidden` (1, n, C), in place; returns it.

        The n tokens are all T of the step, or this rank's (`RankLayout.token_sizes`). `rope` are the cosines and sines
        (1, T, D) of all positions. The last layer returns the R rows that are wanted, (1, R, C), if the step says so.
        """
        sizes = self._layout.token_sizes(step.slots.shape[0])
        weights = self._share if sizes is None else self._whole
        stream = self._attend(hidden[0], rope, step, weights, sizes)
        if len(stream):
            self._transform(stream, weights)
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
        attention, mlp = self._attention, self._mlp
        qkv, gate_up = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
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
    ) -> Tensor:
        """Add attention to `stream`, or to a copy of its wanted rows; returns what it was added to."""
        own = self._own_product(stream)
        x = self._norm(self._input_norm, stream)
        if sizes is not None:
            qkv = self._own_heads(x, weights.qkv, sizes)
        else:
            qkv = (own or nn.functional.linear)(x, *weights.qkv)
        del x
        k_pages, v_pages = step.pages.keys[self._index], step.pages.values[self._index]
        kv_scales = step.pages.scales[self._index]
        q = rotate_and_write(
            qkv,
            (rope[0][0], rope[1][0]) if self._rope else None,
            k_pages,
            v_pages,
            step.slots,
            heads=self._heads,
            norms=self._head_norms,
            kv_scales=kv_scales,
            backend=self._backend,
        )
        del qkv
        step.pages.bound_keys(self._index, step.slots, self._backend)
        if self._is_last and step.wanted is not None:
            rows = step.wanted.rows
            stream, q = stream[rows], q[rows]
            if not len(rows):
                return stream
            step, own = step.of_wanted(), self._own_product(stream)
        mask = self._attention.longreach_attention.mask
        call = AttentionCall(mask, self._scale, kv_scales=kv_scales, batch_invariant=self._invariant)
        out = step_attention(q, self._index, step, call, self._backend)
        if sizes is not None:
            out = heads_to_tokens(out, sizes, self._layout.context_group)
        self._add_product(stream, out.flatten(1), weights, weights.output, own)
        return stream

    def _own_heads(self, x: Tensor, qkv: Projection, sizes: Sequence[int]) -> Tensor:
        """Queries, keys and values of this rank's heads for all T tokens, (T, outputs / R), from its own x (n, C)."""
        ranks = len(sizes)
        send = x.new_empty(ranks, x.shape[0], qkv.weight.shape[0] // ranks)
        for place, block in zip(send, in_blocks(qkv, ranks), strict=True):
            torch.mm(x, block.weight.t(), out=place)
            if block.bias is not None:
                place.add_(block.bias)
        return packed_to_heads(send, sizes, self._layout.context_group)

    def _transform(self, stream: Tensor, weights: LayerWeights) -> None:
        own = self._own_product(stream)
        x = self._norm(self._post_norm, stream)
        if own is not None and self._silu:
            inner = own(x, *weights.gate_up, gated=True)
        else:
            gate_up = (own or nn.functional.linear)(x, *weights.gate_up)
            del x
            # Within a block gates come before what they gate; their products are in the channels' own order.
            by_block = gate_up.view(-1, gate_up.shape[1] // weights.blocks)
            inner = self._activate(by_block).view(stream.shape[0], -1)
            del gate_up, by_block
        self._add_product(stream, inner, weights, weights.down, own)

    def _add_product(
        self, stream: Tensor, x: Tensor, weights: LayerWeights, projection: Projection, own: Product | None
    ) -> None:
        """stream += projection(x), summed over the ranks that each have a part of the projection's inputs."""
        if weights.sum_over is None:
            _add_product(stream, x, projection, own)
            return
        # The stream is the same on all of them, and must be in the sum once.
        if not weights.adds_stream:
            stream.zero_()
        _add_product(stream, x, projection, own)
        distributed.all_reduce(stream, group=weights.sum_over)

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        return rms_norm(x, norm.weight, norm.variance_epsilon, self._backend)

    def _activate(self, gate_up: Tensor) -> Tensor:
        if self._silu:
            return silu_mul(gate_up, self._backend)
        gate, up = gate_up.chunk(2, -1)
        return self._mlp.act_fn(gate) * up


def _parts(layer: nn.Module) -> tuple[Any, Any]:
    """The attention and the MLP of a layer, once it is known that the layer has these parts and no others."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    for part, expected in ((layer, _LAYER), (attention, _ATTENTION), (mlp, _MLP)):
        found = {name for name, _ in part.named_children()} if part is not None else set()
        if part is attention:
            found -= _HEAD_NORMS
        if found != expected:
            raise UnsupportedModelError(
                f"{type(layer).__name__} cannot be fused: {type(part).__name__} has the parts "
                f"{', '.join(sorted(found)) or 'none'}, and {', '.join(sorted(expected))} are computed"
            )
    return attention, mlp


def _add_product(stream: Tensor, x: Tensor, projection: Projection, own: Product | None) -> None:
    """stream += projection(x): the product's kernel adds, so the sum costs no pass of its own and is rounded once."""
    if own is not None:
        own(x, projection.weight, bias=projection.bias, add_to=stream)
        return
    stream.addmm_(x, projection.weight.t())
    if projection.bias is not None:
        stream.add_(projection.bias)
