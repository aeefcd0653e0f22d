"""A token alone, in two kernels: its experts' inner channels, and the sum of what the experts make of these."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach_kernels.backends.triton.config import capability, cdiv, launch
from longreach_kernels.linear.rows_kernel import KernelWeight
from longreach_kernels.linear.unpack import HALF
from longreach_kernels.moe.experts import Experts
from longreach_kernels.moe.one_kernel import one_down_kernel, one_up_kernel


class OneTile(NamedTuple):
    """Outputs and inputs of a turn, warps, and loads in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def one_tile(layout: int, is_up: bool, arch: int) -> OneTile:
    """The tile of a product of one token with weights of a layout of `linear.unpack`."""
    if arch == 0:
        return OneTile(16, 128, 4, 1)
    if layout == HALF.value:
        return OneTile(8, 512, 4, 3)
    return OneTile(16 if is_up else 8, 512, 4, 2)


def _options(weight: KernelWeight, tile: OneTile) -> dict[str, Any]:
    scales = weight.numbers if weight.scales is None else weight.scales
    return {
        "STRIDES": (*weight.numbers.stride()[:2], scales.stride(0), weight.stride_s),
        "FORMAT": weight.layout,
        "GROUP": weight.group,
        "BLOCK_ROWS": weight.block_rows,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def multiply_up(x: Tensor, chosen: Tensor, layer: Experts, weight: KernelWeight, tile: OneTile | None = None) -> Tensor:
    """The inner channels (k, I) of a token x (1, C) with the experts `chosen` (1, k), after the activation where the
    kernels know it."""
    outputs = layer.gate_up.shape[1] // (2 if layer.is_gated else 1)
    out = torch.empty(chosen.shape[1], outputs, dtype=x.dtype, device=x.device)
    tile = tile or one_tile(weight.layout, True, capability(x.device))
    launch(
        one_up_kernel,
        (cdiv(outputs, tile.block_n), chosen.shape[1]),
        x,
        weight.numbers,
        weight.scales,
        weight.zeros,
        layer.gate_up_bias,
        out,
        chosen,
        N=outputs,
        K=x.shape[1],
        E=layer.count,
        FIRST=layer.first,
        INTERLEAVED=layer.is_gated and layer.interleaved,
        ACTIVATION=layer.activation if layer.is_gated else None,
        ALPHA=layer.alpha,
        LIMIT=layer.limit,
        **_options(weight, tile),
    )
    return out


def add_down(
    inner: Tensor,
    chosen: Tensor,
    weights: Tensor,
    layer: Experts,
    weight: KernelWeight,
    out: Tensor,
    *,
    add: bool,
    scale: float,
    tile: OneTile | None = None,
) -> None:
    """out (1, C) = scale * the weighted sum of what a token's experts make of its inner channels (k, I), or plus that
    if `add`."""
    tile = tile or one_tile(weight.layout, False, capability(out.device))
    launch(
        one_down_kernel,
        (cdiv(layer.channels, tile.block_n),),
        inner,
        weight.numbers,
        weight.scales,
        weight.zeros,
        layer.down_bias,
        out,
        chosen,
        weights,
        N=layer.channels,
        K=inner.shape[1],
        E=layer.count,
        FIRST=layer.first,
        TOP_K=chosen.shape[1],
        ADD=add,
        SCALE=scale,
        **_options(weight, tile),
    )
