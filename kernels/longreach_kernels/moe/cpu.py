"""Mixture layers on a CPU: the rows of one expert after another through the matrix library."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.linear import Weight, dequantize, take_experts
from longreach_kernels.moe.experts import Experts
from longreach_kernels.moe.reference import activate


def experts_product(x: Tensor, experts: Tensor, weights: Tensor, layer: Experts) -> Tensor:
    """The sum over a token's experts, (T, C), fp32 or fp64, in the order of the experts' numbers."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(x.shape[0], layer.channels, dtype=wide)
    numbers = experts.long().flatten() - layer.first
    order = numbers.argsort(stable=True)
    counts = torch.bincount(numbers.clamp(-1, layer.count) + 1, minlength=layer.count + 2).tolist()
    start = counts[0]  # of experts before the first
    for expert, count in enumerate(counts[1:-1]):
        if count:
            pairs = order[start : start + count]
            tokens = pairs // experts.shape[1]
            rows = _expert(x[tokens], expert, layer).to(wide)
            out.index_add_(0, tokens, rows * weights.flatten()[pairs, None].to(wide))
        start += count
    return out


def _expert(x: Tensor, expert: int, layer: Experts) -> Tensor:
    gate_up_bias = None if layer.gate_up_bias is None else layer.gate_up_bias[expert]
    down_bias = None if layer.down_bias is None else layer.down_bias[expert]
    inner = activate(torch.nn.functional.linear(x, _weight(layer.gate_up, expert, x.dtype), gate_up_bias), layer)
    return torch.nn.functional.linear(inner, _weight(layer.down, expert, x.dtype), down_bias)


def _weight(weight: Weight, expert: int, dtype: torch.dtype) -> Tensor:
    return dequantize(take_experts(weight, expert, expert + 1), dtype)[0]
