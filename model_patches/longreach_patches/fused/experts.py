"""The experts of a model's module as a value that `longreach_kernels.moe` computes with, and a rank's share of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from longreach_kernels.linear import take_experts
from longreach_kernels.moe import Experts
from torch import Tensor

from longreach_patches.families import Mixture
from longreach_patches.fused.activation import BY_MODULE
from longreach_patches.layout import RankLayout


def experts_of(module: Any, mixture: Mixture) -> Experts:
    """The weights of all experts, in the memory of the module's parameters, or the value of a module of a format."""
    value = getattr(module, "experts_value", None)
    if value is not None:
        return value
    biases = (getattr(module, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj"))
    gate_up_bias, down_bias = (bias if bias is None else bias.detach() for bias in biases)
    turned = _turned if mixture.transposed else Tensor.detach
    gate_up, down = turned(module.gate_up_proj), turned(module.down_proj)
    layer = Experts(gate_up, down, gate_up_bias, down_bias, interleaved=mixture.transposed)
    if mixture.clamped is not None:
        alpha, limit = (float(getattr(module, name)) for name in mixture.clamped)
        return replace(layer, activation="swiglu_clamped", alpha=alpha, limit=limit)
    known = BY_MODULE.get(type(module.act_fn).__name__)
    return replace(layer, activation=known or _gated_by(module.act_fn))


def share_of_experts(layer: Experts, layout: RankLayout) -> Experts:
    """The run of experts that one of the ranks with the same weights computes, as views."""
    ranks, rank = layout.context_size, layout.context_rank
    start, stop = rank * layer.count // ranks, (rank + 1) * layer.count // ranks
    biases = (layer.gate_up_bias, layer.down_bias)
    gate_up_bias, down_bias = (bias if bias is None else bias[start:stop] for bias in biases)
    return replace(
        layer,
        gate_up=take_experts(layer.gate_up, start, stop),
        down=take_experts(layer.down, start, stop),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        first=layer.first + start,
    )


def _turned(weight: Tensor) -> Tensor:
    """A weight (E, inputs, outputs) as (E, outputs, inputs), contiguous; the parameter becomes a view of that."""
    out = weight.detach().transpose(1, 2).contiguous()
    weight.data = out.transpose(1, 2)
    return out


def _gated_by(activation: Any) -> Any:
    """A function of gates beside what they gate, for activations that the kernels do not know."""

    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    return gated
