"""A decoder layer over KV pages in nine kernels: norm, QKV, rotary and page write, attention, output projection;
norm, gate and up, activation, down projection. Both last projections add to the residual stream themselves.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from longreach_kernels import paged_attention
from torch import Tensor, nn

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.pages import PagedStep

from .activation import silu_mul
from .rotary import HeadNorms, rotate_and_write

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedLayer:
    """Computes what a decoder layer of the supported families computes, with its own weights.

    Projections of the same input are joined: the layer's parameters become views of one matrix, so that nothing is held
    twice and the layer's own forward stays as it was.
    """

    def __init__(self, layer: nn.Module) -> None:
        """Join the projections of `layer`.

        Raises:
            UnsupportedModelError: the layer is not made as those of the supported families.
        """
        attention, mlp = _parts(layer)
        self._attention = attention
        self._mlp = mlp
        self._index = cast("int", attention.layer_idx)
        self._scale = cast("float", attention.scaling)
        self._heads = attention.o_proj.in_features // attention.head_dim
        # SmolLM3 does not encode positions in some layers.
        self._rope = bool(getattr(attention, "use_rope", True))
        self._head_norms = None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = attention.q_norm, attention.k_norm
            self._head_norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.variance_epsilon)
        self._qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self._silu = type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")  # torch's or transformers' own
        self._input_norm = layer.input_layernorm
        self._post_norm = layer.post_attention_layernorm

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], step: PagedStep) -> Tensor:
        """Add this layer to the residual stream `hidden` (1, T, C), in place; returns it.

        `rope` are the cosines and sines (1, T, D) of the tokens' positions.
        """
        stream = hidden[0]
        self._attend(stream, rope, step)
        self._transform(stream)
        return hidden

    def _attend(self, stream: Tensor, rope: tuple[Tensor, Tensor], step: PagedStep) -> None:
        qkv = nn.functional.linear(_norm(self._input_norm, stream), *self._qkv)
        layer = self._attention.longreach_attention
        backend = layer.backend.name
        k_pages, v_pages = step.pages.keys[self._index], step.pages.values[self._index]
        q = rotate_and_write(
            qkv,
            (rope[0][0], rope[1][0]) if self._rope else None,
            k_pages,
            v_pages,
            step.slots,
            heads=self._heads,
            norms=self._head_norms,
            backend=backend,
        )
        del qkv
        out = paged_attention(q, k_pages, v_pages, step.batch, layer.mask, scale=self._scale, backend=backend)
        _add_product(stream, out.flatten(1), self._attention.o_proj)

    def _transform(self, stream: Tensor) -> None:
        gate_up = nn.functional.linear(_norm(self._post_norm, stream), *self._gate_up)
        if self._silu:
            inner = silu_mul(gate_up, self._attention.longreach_attention.backend.name)
        else:
            gate, up = gate_up.chunk(2, -1)
            inner = self._mlp.act_fn(gate) * up
        del gate_up
        _add_product(stream, inner, self._mlp.down_proj)


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


def _norm(norm: Any, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _joined(*projections: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight and one bias for projections of the same input, whose parameters become views of them."""
    weight = torch.cat([projection.weight.detach() for projection in projections])
    bias = None
    if projections[0].bias is not None:
        bias = torch.cat([projection.bias.detach() for projection in projections])
    start = 0
    for projection in projections:
        end = start + projection.out_features
        projection.weight.data = weight[start:end]
        if bias is not None:
            projection.bias.data = bias[start:end]
        start = end
    return weight, bias


def _add_product(stream: Tensor, x: Tensor, projection: nn.Linear) -> None:
    """stream += projection(x): the product's kernel adds, so the sum costs no pass of its own and is rounded once."""
    stream.addmm_(x, projection.weight.t())
    if projection.bias is not None:
        stream.add_(projection.bias)
