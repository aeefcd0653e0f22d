"""Random experts of every format."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from longreach_kernels.linear import Fp8Blocks, Int4Groups, Mxfp4, Weight, quantize_fp8
from longreach_kernels.moe import Experts

from tests.kernels.moe.layers import random_layer

KINDS = ("fp8 channels", "fp8 blocks", "fp8 blocks of 64", "int4", "int4 zeros", "mxfp4")


def packed(weight: torch.Tensor, kind: str) -> Weight:
    """A weight (E, N, K) in a format; of four bits random numbers of about its size."""
    shape, device = weight.shape, weight.device
    if kind == "fp8 blocks of 64":
        blocks = quantize_fp8(weight.bfloat16(), "blocks")
        assert isinstance(blocks, Fp8Blocks)
        return blocks.with_rows(64)
    if kind.startswith("fp8"):
        return quantize_fp8(weight.bfloat16(), kind[4:])  # type: ignore[arg-type]
    groups = (*shape[:-1], shape[-1] // 32)
    if kind == "mxfp4":
        numbers = torch.randint(256, (*shape[:-1], shape[-1] // 2)).to(torch.uint8)
        return Mxfp4(numbers.to(device), torch.randint(122, 125, groups).to(device, torch.uint8))
    scales = (0.01 * (0.5 + torch.rand(groups))).half().to(device)
    zeros = torch.randint(16, groups).to(device, torch.uint8) if kind == "int4 zeros" else None
    return Int4Groups.pack(torch.randint(16, shape).to(device), scales, zeros)


def random_packed(
    kind: str, count: int, channels: int, inner: int, dtype: torch.dtype, device: Any = "cpu", **more: Any
) -> Experts:
    """Experts of a format; channels and inner channels are multiples of 32."""
    layer = random_layer(count, channels, inner, dtype, device, **more)
    return dataclasses.replace(layer, gate_up=packed(layer.gate_up, kind), down=packed(layer.down, kind))
