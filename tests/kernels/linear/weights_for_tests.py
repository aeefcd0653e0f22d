"""Random weights of every format."""

from __future__ import annotations

import torch
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4, Weight, quantize_fp8

KINDS = ("fp8 channels", "fp8 blocks", "int4", "int4 zeros", "int4 fp32 scales", "mxfp4")


def random_weight(kind: str, outputs: int, inputs: int, *, group: int = 32, seed: int = 0) -> Weight:
    """A weight (outputs, inputs) whose values are about 0.02, as a model's."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    plain = 0.02 * torch.randn(outputs, inputs, generator=generator)
    if kind == "fp16":
        return plain.half()
    if kind in ("fp8 channels", "fp8 blocks"):
        weight = quantize_fp8(plain * (0.5 + torch.rand(outputs, 1, generator=generator)), kind[4:])
        assert isinstance(weight, Fp8Blocks | Fp8Channels)
        return weight
    if kind == "mxfp4":
        exponents = 120 + integers(4, outputs, inputs // 32)
        return Mxfp4(integers(256, outputs, inputs // 2).to(torch.uint8), exponents.to(torch.uint8))
    scales = 0.005 * (0.5 + torch.rand(outputs, inputs // group, generator=generator))
    zeros = integers(16, outputs, inputs // group).to(torch.uint8) if kind == "int4 zeros" else None
    scales = scales if kind == "int4 fp32 scales" else scales.half()
    return Int4Groups.pack(integers(16, outputs, inputs), scales, zeros)
