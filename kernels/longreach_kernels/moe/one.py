"""One token and its experts on a GPU, in two kernels."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.linear.rows_kernel import KernelWeight
from longreach_kernels.linear.unpack import HALF
from longreach_kernels.moe.experts import Experts
from longreach_kernels.moe.one_kernel import one_down_kernel, one_up_kernel
from longreach_kernels.moe.tile_sizes import OneTile


def up_one(x: Tensor, experts: Tensor, layer: Experts, weight: KernelWeight, tile: OneTile) -> Tensor:
    """The products upwards (k, I) of a token x (1, C) with its experts (1, k). Rows of experts that are not here are
    not written."""
    width = layer.gate_up.shape[1] // (2 if layer.is_gated else 1)
    inner = x.new_empty(experts.shape[1], width)
    launch(
        one_up_kernel,
        (cdiv(width, tile.block_n), experts.shape[1]),
        x,
        weight.numbers,
        weight.scales,
        weight.zeros,
        layer.gate_up_bias,
        inner,
        experts,
        N=width,
        K=x.shape[1],
        E=layer.count,
        FIRST=layer.first,
        INTERLEAVED=layer.is_gated and layer.interleaved,
        ACTIVATION=layer.activation if layer.is_gated else None,
        ALPHA=layer.alpha,
        LIMIT=layer.limit,
        **_options(weight, tile),
    )
    return inner


def down_one(
    inner: Tensor,
    experts: Tensor,
    weights: Tensor,
    layer: Experts,
    weight: KernelWeight,
    tile: OneTile,
    out: Tensor,
    *,
    add: bool,
    scale: float,
) -> None:
    """out (1, C) = scale * the sum of weights (1, k) times the products downwards of inner (k, I), or plus that if
    `add`."""
    launch(
        one_down_kernel,
        (cdiv(layer.channels, tile.block_n),),
        inner,
        weight.numbers,
        weight.scales,
        weight.zeros,
        layer.down_bias,
        out,
        experts,
        weights,
        N=layer.channels,
        K=inner.shape[1],
        E=layer.count,
        FIRST=layer.first,
        TOP_K=experts.shape[1],
        RANKS=triton.next_power_of_2(experts.shape[1]),
        ADD=add,
        SCALE=scale,
        **_options(weight, tile),
    )


def _options(weight: KernelWeight, tile: OneTile) -> dict[str, Any]:
    scales = weight.numbers if weight.scales is None else weight.scales
    options: dict[str, Any] = {
        "STRIDES": (*weight.numbers.stride()[:2], scales.stride(0), weight.stride_s),
        "LAYOUT": (weight.layout, weight.group, weight.block_rows),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k if weight.layout == HALF.value else max(tile.block_k, 64),
        "PDL": tile.overlaps,
        "num_warps": tile.num_warps,
    }
    return options | ({"launch_pdl": True} if tile.overlaps else {})
