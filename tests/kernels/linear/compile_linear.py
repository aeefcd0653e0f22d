"""Compile the kernels of linear layers for GPUs that are not there, and print the shared memory of each as JSON.

As `tests.kernels.compile_portable`. Arguments: a compute capability and a launch of `LAUNCHES`, such as `80:int4`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from longreach_kernels.linear import gpu, linear
from longreach_kernels.linear.activation import After
from longreach_kernels.linear.activation_kernel import finish
from longreach_kernels.linear.dequantize_kernel import dequantized
from longreach_kernels.linear.quantize_kernel import rows_by_group, rows_by_token
from longreach_kernels.linear.rows_kernel import kernel_weight

from tests.kernels.compile_portable import _Driver, pretend
from tests.kernels.linear.weights_for_tests import random_weight
from tests.pairwise import thinned

_OUTPUTS = 64 * 200  # few and many programs have tiles of their own


def _product_without_numbers(x: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """In place of the matrix library's product of FP8, which a CPU has for some scales alone."""
    return torch.empty(x.shape[0], weight.shape[1], dtype=torch.bfloat16)


def few(kind: str, group: int = 128, dtype: torch.dtype = torch.bfloat16) -> None:
    """Products of few rows, with what may be around them, in tiles for few and for many outputs.

    With each number of rows and each form once, and another of them each day.
    """
    for rows, form in thinned((3, 20), ("few outputs", "gated", "added"), count=1, strength=1):
        outputs = 64 if form == "few outputs" else _OUTPUTS
        x, weight = torch.empty(rows, 384).to(dtype), random_weight(kind, outputs, 384, group=group)
        weight = weight.to(dtype) if isinstance(weight, torch.Tensor) else weight
        if form == "added":
            linear(x, weight, x.new_zeros(outputs), backend="triton", add_to=x.new_zeros(rows, outputs), scale=0.5)
        else:
            linear(x, weight, backend="triton", gated=form == "gated", activation="gelu_tanh")


def whole(kind: str) -> None:
    """Weights in 16 bits."""
    for dtype in (torch.bfloat16, torch.float16):
        packed = kernel_weight(random_weight(kind, 64, 384, group=64))
        assert packed is not None
        dequantized(packed, 64, 384, dtype)


def around() -> None:
    """What follows a product of many rows."""
    product = torch.empty(4, 4096).bfloat16()
    finish(product, After(gated=True))
    finish(product, After(product[0], add_to=product.clone(), scale=0.5))


def fp8_rows() -> None:
    """Activations in FP8."""
    for width in (4096, 28672):
        x = torch.empty(4, width).bfloat16()
        rows_by_token(x)
        rows_by_token(x, torch.ones(1), gated=True)
        rows_by_group(x)
        rows_by_group(x, gated=True)


LAUNCHES: dict[str, Callable[[], None]] = {
    "16 bits": lambda: few("fp16"),
    "fp8 channels": lambda: few("fp8 channels"),
    "fp8 blocks": lambda: few("fp8 blocks"),
    "int4": lambda: few("int4"),
    "int4 groups of 32": lambda: few("int4 zeros", 32),
    "int4 fp16": lambda: few("int4 zeros", 128, torch.float16),
    "mxfp4": lambda: few("mxfp4"),
    "mxfp4 fp32": lambda: few("mxfp4", dtype=torch.float32),
    "whole fp8": lambda: whole("fp8 blocks"),
    "whole int4": lambda: whole("int4 zeros"),
    "whole mxfp4": lambda: whole("mxfp4"),
    "around": around,
    "fp8 rows": fp8_rows,
}


def main(arguments: list[str]) -> dict[str, dict[str, int]]:
    """Bytes of shared memory, by argument and kernel."""
    compiler = pretend()
    gpu.scaled_mm = _product_without_numbers
    for compiler.launch in arguments:
        arch, name = compiler.launch.split(":")
        _Driver.arch = int(arch)
        LAUNCHES[name]()
    return compiler.shared


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
