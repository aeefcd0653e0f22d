"""Layouts of MXFP4: gpt-oss's blocks of experts, and compressed-tensors' packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from longreach_kernels.linear import Mxfp4, Weight
from torch import Tensor

from longreach_patches.quantized.layouts import Layout, check


@dataclass(frozen=True)
class Mxfp4Layout(Layout):
    """MXFP4, two numbers a byte, the first in the low bits, and a byte for the scale of 32.

    Attributes:
        in_blocks: whether the file has blocks of 16 bytes, as gpt-oss has (.., N, K / 32, 16).
    """

    in_blocks: bool = True
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "packed": ("weight_packed", "blocks"),
        "scales": ("weight_scale", "scales"),
    }

    @property
    def name(self) -> str:
        return "mxfp4"

    def read(self, found: Mapping[str, Tensor], shape: torch.Size) -> Weight:
        *lead, outputs, inputs = shape
        packed = found["packed"].flatten(-2) if self.in_blocks else found["packed"]
        check({"packed": packed}, "packed", torch.uint8, (*lead, outputs, inputs // 2))
        check(found, "scales", torch.uint8, (*lead, outputs, inputs // Mxfp4.group))
        return Mxfp4(packed.contiguous(), found["scales"].contiguous())

    def empty(self, shape: torch.Size) -> Weight:
        *lead, outputs, inputs = shape
        if inputs % Mxfp4.group:
            raise ValueError(f"{inputs} inputs; they must be a multiple of {Mxfp4.group}")
        sizes = (inputs // 2, inputs // Mxfp4.group)
        return Mxfp4(*(torch.empty(*lead, outputs, size, dtype=torch.uint8) for size in sizes))
