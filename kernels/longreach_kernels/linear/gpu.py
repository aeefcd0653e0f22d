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

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from longreach_kernels.backends.triton.config import capability, cdiv
from longreach_kernels.linear.activation import Activation, After
from longreach_kernels.linear.activation_kernel import finish
from longreach_kernels.linear.dequantize_kernel import dequantized
from longreach_kernels.linear.formats import Fp8Blocks, Fp8Channels, Int4Groups, Weight
from longreach_kernels.linear.fp8_products import GROUP, library_takes_fp8
from longreach_kernels.linear.parts import dequantize
from longreach_kernels.linear.quantize_kernel import Fp8Rows, rows_by_group, rows_by_token
from longreach_kernels.linear.rows_kernel import (
    FP8_ROWS,
    HALF_ROWS,
    PACKED_ROWS,
    KernelWeight,
    kernel_weight,
    rows_linear,
)


def gpu_linear(x: Tensor, weight: Weight, after: After, *, gated_input: bool, invariant: bool) -> Tensor:
    """`linear.linear` on a GPU.

    Raises:
        ValueError: the kernels have no form of the weight, and nothing else is batch invariant.
    """
    rows = len(x)
    outputs = weight.shape[0] // 2 if after.gated else weight.shape[0]
    if rows == 0:
        return x.new_empty(0, outputs) if after.add_to is None else after.add_to
    x = x.contiguous()
    fp8 = not invariant and rows > FP8_ROWS and _takes_fp8(x, weight)
    if gated_input and not fp8:
        x = finish(x, After(gated=True, activation=after.activation))
        gated_input = False
    if isinstance(weight, Int4Groups) and weight.permutation is not None:
        x = x[:, weight.permutation]
        weight = replace(weight, permutation=None)
    packed = kernel_weight(weight)
    if invariant and packed is None:
        raise ValueError(
            "batch_invariant: the weight's inputs do not fill words of 4 bytes, or its groups are no power of 2; "
            "serve it without batch invariance"
        )
    most = HALF_ROWS if isinstance(weight, Tensor) else PACKED_ROWS
    if packed is not None and (invariant or (rows <= most and not fp8)):
        out = x.new_empty(rows, outputs) if after.add_to is None else after.add_to
        return rows_linear(x, packed, out, after, invariant=invariant)
    if fp8:
        return finish(_fp8_product(x, weight, gated_input, after.activation), after)
    return finish(library_product(x, weight, packed), after)


def library_product(x: Tensor, weight: Weight, packed: KernelWeight | None) -> Tensor:
    """x W^T (T, N), contiguous, of many rows, in the dtype of x; `packed` is of the weight."""
    if isinstance(weight, Tensor):
        return x @ weight.T
    outputs, inputs = weight.shape
    whole = dequantize(weight, x.dtype) if packed is None else dequantized(packed, outputs, inputs, x.dtype)
    return x @ whole.T


def _takes_fp8(x: Tensor, weight: Weight) -> bool:
    """Whether the matrix library multiplies FP8 of such sizes on such a GPU."""
    return library_takes_fp8(weight, x.dtype, capability(x.device))


def takes_fp8_rows(x: Tensor, weight: Weight) -> bool:
    """Whether rows x (T, K) are quantised for a product, each token by its own greatest value: then whoever makes them
    may give `fp8_rows_linear` quantised ones."""
    if isinstance(weight, Fp8Channels) and (weight.input_scale is not None or weight.input_bound is not None):
        return False
    return len(x) > FP8_ROWS and _takes_fp8(x, weight)


def fp8_rows_linear(made: Fp8Rows, rows: int, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product (rows, N) of quantised rows with a weight, by token for scales by channel and by token and 128 inputs
    for scales by block."""
    product = _by_channel(made, weight, dtype) if isinstance(weight, Fp8Channels) else _by_block(made, weight, dtype)
    return finish(product[:rows], After(bias))


def _fp8_product(x: Tensor, weight: Weight, gated: bool, activation: Activation) -> Tensor:
    if isinstance(weight, Fp8Channels):
        made = rows_by_token(x, weight.input_scale, weight.input_bound, gated=gated, activation=activation)
        return _by_channel(made, weight, x.dtype)[: len(x)]
    return _by_block(rows_by_group(x, gated=gated, activation=activation), weight, x.dtype)[: len(x)]


def _by_channel(made: Fp8Rows, weight: Fp8Channels, dtype: torch.dtype) -> Tensor:
    return scaled_mm(
        made.values,
        weight.values.T,
        made.scales,
        ScalingType.RowWise,
        weight.scales[None, :].contiguous(),
        ScalingType.RowWise,
        output_dtype=dtype,
        use_fast_accum=True,
    )


def _by_block(made: Fp8Rows, weight: Weight, dtype: torch.dtype) -> Tensor:
    """The library takes scales of the weight whose columns lie next to each other, in multiples of 4."""
    assert isinstance(weight, Fp8Blocks)
    columns = cdiv(weight.shape[1], GROUP)
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
        output_dtype=dtype,
    )
