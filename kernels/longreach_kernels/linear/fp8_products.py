"""Where products with FP8 weights are made in FP8, told from shapes. Elsewhere many rows need a dequantised copy."""

from __future__ import annotations

import torch

from longreach_kernels.linear.formats import Fp8Blocks, Fp8Channels, Weight

GROUP = 128  # inputs of a row, or of a block, that share a scale
_BY_CHANNEL_FROM, _BY_BLOCK_FROM, _BY_BLOCK_BEFORE = 89, 90, 100
_ALIGNED = 16


def library_takes_fp8(weight: Weight, dtype: torch.dtype, arch: int) -> bool:
    """Whether the matrix library multiplies many rows of `dtype` with a weight (N, K) in FP8, on a GPU of compute
    capability `arch` (90 for 9.0). The weight may be on the meta device."""
    if isinstance(weight, Fp8Channels):
        there = arch >= _BY_CHANNEL_FROM
    elif isinstance(weight, Fp8Blocks):
        there = _BY_BLOCK_FROM <= arch < _BY_BLOCK_BEFORE and weight.block == (GROUP, GROUP)
    else:
        return False
    aligned = all(size % _ALIGNED == 0 for size in (*weight.shape, weight.values.stride(0)))
    return there and aligned and dtype == torch.bfloat16


def experts_take_fp8(weight: Weight, dtype: torch.dtype, arch: int) -> bool:
    """Whether grouped products with a weight (E, N, K) are made in FP8; as `library_takes_fp8`."""
    if arch < _BY_CHANNEL_FROM or dtype == torch.float32:
        return False
    return isinstance(weight, Fp8Channels) or (isinstance(weight, Fp8Blocks) and weight.block[1] == GROUP)
