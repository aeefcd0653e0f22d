"""Which kernel, or which function of the matrix library, computes a product on a GPU.

| rows | weight | form |
|---|---|---|
| few | any | own kernel that reads packed weights once, activations in 16 bits |
| many | 16 bits | matrix library |
| many | FP8 by channel, bf16, from sm_89 on | library's product of FP8 rows, activations quantised by token |
| many | FP8 by block, bf16, sm_90 | library's product of FP8 blocks, activations quantised by token and 128 inputs |
| many | other | dequantised into a scratch, then the matrix library |
| any | with batch invariance | own kernel, in tiles whose bits do not depend on the rows |
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from longreach_kernels.backends.triton.config import capability, cdiv
from longreach_kernels.linear.activation import Activation
from longreach_kernels.linear.activation_kernel import finish
from longreach_kernels.linear.dequantize_kernel import dequantized
from longreach_kernels.linear.formats import Fp8Blocks, Fp8Channels, Weight
from longreach_kernels.linear.parts import dequantize
from longreach_kernels.linear.quantize_kernel import rows_by_group, rows_by_token
from longreach_kernels.linear.rows_kernel import MAX_ROWS, kernel_weight, rows_linear

_GROUP = 128


def gpu_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    *,
    gated: bool,
    activation: Activation,
    add_to: Tensor | None,
    scale: float,
    invariant: bool,
) -> Tensor:
    """`linear.linear` on a GPU; inputs are in the order of the weight.

    Raises:
        ValueError: the kernels have no form of the weight, and nothing else is batch invariant.
    """
    x = x.contiguous()
    rows = len(x)
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if rows == 0:
        return x.new_empty(0, outputs) if add_to is None else add_to
    packed = kernel_weight(weight)
    if invariant and packed is None:
        raise ValueError(
            "batch_invariant: the weight's inputs do not fill words of 4 bytes, or its groups are no power of 2; "
            "serve it without batch invariance"
        )
    if packed is not None and (invariant or rows <= MAX_ROWS):
        out = x.new_empty(rows, outputs) if add_to is None else add_to
        return rows_linear(
            x, packed, bias, out, gated=gated, activation=activation, add=add_to is not None, scale=scale
        )
    product = _many(x, weight)
    return finish(product, bias, gated=gated, activation=activation, add_to=add_to, scale=scale)


def _many(x: Tensor, weight: Weight) -> Tensor:
    """x W^T (T, N), contiguous, of many rows."""
    if isinstance(weight, Tensor):
        return x @ weight.T
    if isinstance(weight, Fp8Channels) and _takes_fp8(x, weight, 89):
        return _scaled_channels(x, weight)
    if isinstance(weight, Fp8Blocks) and weight.block == (_GROUP, _GROUP) and _takes_fp8(x, weight, 90, 100):
        return _scaled_blocks(x, weight)
    packed = kernel_weight(weight)
    outputs, inputs = weight.shape
    whole = dequantize(weight, x.dtype) if packed is None else dequantized(packed, outputs, inputs, x.dtype)
    return x @ whole.T


def _takes_fp8(x: Tensor, weight: Fp8Channels | Fp8Blocks, least: int, below: int = 1000) -> bool:
    """Whether the matrix library multiplies FP8 of such sizes on a GPU of a capability from `least` to `below`."""
    outputs, inputs = weight.shape
    aligned = outputs % 16 == 0 and inputs % 16 == 0 and weight.values.stride(0) % 16 == 0
    return x.dtype == torch.bfloat16 and aligned and least <= capability(x.device) < below


def _scaled_channels(x: Tensor, weight: Fp8Channels) -> Tensor:
    made = rows_by_token(x, weight.input_scale, weight.input_bound)
    return scaled_mm(
        made.values,
        weight.values.T,
        made.scales,
        ScalingType.RowWise,
        weight.scales[None, :].contiguous(),
        ScalingType.RowWise,
        output_dtype=x.dtype,
        use_fast_accum=True,
    )[: len(x)]


def _scaled_blocks(x: Tensor, weight: Fp8Blocks) -> Tensor:
    """The library takes scales of the weight whose columns lie next to each other, in multiples of 4."""
    made = rows_by_group(x)
    columns = cdiv(weight.shape[1], _GROUP)
    scales = weight.scales
    if columns % 4 or not scales.is_contiguous():
        scales = torch.nn.functional.pad(scales, (0, -columns % 4)).contiguous()
    return scaled_mm(
        made.values,
        weight.values.T,
        made.scales,
        ScalingType.BlockWise1x128,
        scales.T,
        ScalingType.BlockWise128x128,
        output_dtype=x.dtype,
    )[: len(x)]
