"""Linear layers whose weights are values with a format: 16 bits, FP8, INT4 or MXFP4.

Depends on torch, and for a GPU on triton, only.
"""

from longreach_kernels.linear.formats import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4, Weight
from longreach_kernels.linear.linear import linear
from longreach_kernels.linear.parts import (
    dequantize,
    join_outputs,
    stack_experts,
    take_experts,
    take_inputs,
    take_outputs,
)
from longreach_kernels.linear.quantize import quantize_fp8
from longreach_kernels.linear.quantized import Quantized

__all__ = [
    "Fp8Blocks",
    "Fp8Channels",
    "Int4Groups",
    "Mxfp4",
    "Quantized",
    "Weight",
    "dequantize",
    "join_outputs",
    "linear",
    "quantize_fp8",
    "stack_experts",
    "take_experts",
    "take_inputs",
    "take_outputs",
]
