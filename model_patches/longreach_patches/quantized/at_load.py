"""16-bit weights made into FP8 ones while they are loaded (`--quantization`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from longreach_kernels.linear import Weight, quantize_fp8
from torch import Tensor

from longreach_patches.quantized.layouts import Fp8BlocksLayout, Fp8ChannelsLayout, Layout
from longreach_patches.quantized.scheme import Group, Scheme

# What `--quantization` takes, and what shares a scale.
KINDS: Mapping[str, Literal["channels", "blocks"]] = {"fp8": "channels", "fp8_blocks": "blocks"}
# Parts of names of what chooses experts or streams, or says how a state decays: a few outputs, which decide much.
_CHOOSING = frozenset(
    {"gate", "router", "shared_expert_gate", "altup"} | {"in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj"}
)
# Of Mamba-2, where sizes of steps are a part of the first projection.
_STEPPING = (".mamba.in_proj", ".mixer.in_proj")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AtLoadLayout(Layout):
    """16-bit weights in the file, and FP8 on the device."""

    kind: Literal["channels", "blocks"]
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {"values": ("weight",)}

    @property
    def name(self) -> str:
        return f"{self._alike.name}, quantised at load"

    def read(self, found: Mapping[str, Tensor], shape: torch.Size) -> Weight:
        weight = found["values"]
        if weight.dtype not in _FLOATS or weight.shape != shape:
            raise ValueError(f"expected floats of shape {tuple(shape)}, found {weight.dtype} of {tuple(weight.shape)}")
        return quantize_fp8(weight, self.kind)

    def empty(self, shape: torch.Size) -> Weight:
        return self._alike.empty(shape)

    @property
    def _alike(self) -> Layout:
        return Fp8ChannelsLayout() if self.kind == "channels" else Fp8BlocksLayout()


def at_load(name: str) -> Scheme:
    """The scheme of `--quantization`: the matrices of all layers, but for what chooses experts and the decays of
    states; neither the embedding nor the output layer.

    Raises:
        ValueError: there is no such kind.
    """
    if name not in KINDS:
        raise ValueError(f"quantization must be {' or '.join(KINDS)}, got {name!r}")
    return Scheme(name, (Group(AtLoadLayout(KINDS[name]), _in_layers),))


def _in_layers(name: str) -> bool:
    parts = name.split(".")
    return "layers" in parts and not _CHOOSING.intersection(parts) and not name.endswith(_STEPPING)
