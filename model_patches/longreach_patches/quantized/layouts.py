"""How publishers lay out a quantised weight in safetensors files, and the FP8 layouts.

A layout reads the tensors of one module, or of all experts of a layer stacked along a leading dimension, and gives a
value of `longreach_kernels.linear`. Each tensor has a *role* here; publishers have several names for some roles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Weight
from torch import Tensor

FP8 = torch.float8_e4m3fn


class Layout(ABC):
    """One publisher's layout of one module's weight.

    Attributes:
        roles: the names that a module's tensors may have, after the module's own and a dot; the first one that is there
            counts.
        optional: roles that a module may be without.
    """

    roles: ClassVar[Mapping[str, tuple[str, ...]]]
    optional: ClassVar[frozenset[str]] = frozenset()

    @property
    @abstractmethod
    def name(self) -> str:
        """The format, for people: the numbers, and what shares a scale."""

    @abstractmethod
    def read(self, found: Mapping[str, Tensor], shape: torch.Size) -> Weight:
        """The weight (.., N, K) of that `shape`, of tensors by role, on the device of these.

        Raises:
            ValueError: a tensor has another dtype or shape than the layout has.
        """

    @abstractmethod
    def empty(self, shape: torch.Size) -> Weight:
        """A weight (.., N, K) without numbers, on torch's default device.

        Raises:
            ValueError: weights of this shape do not have the layout.
        """


@dataclass(frozen=True)
class Fp8BlocksLayout(Layout):
    """FP8 with a scale for each 128 outputs and 128 inputs, by which numbers are multiplied."""

    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "values": ("weight",),
        "scales": ("weight_scale_inv", "weight_scale"),
    }

    @property
    def name(self) -> str:
        return "fp8 in blocks of 128x128"

    def read(self, found: Mapping[str, Tensor], shape: torch.Size) -> Weight:
        check(found, "values", FP8, shape)
        return Fp8Blocks(found["values"].contiguous(), found["scales"].float().contiguous())

    def empty(self, shape: torch.Size) -> Weight:
        *lead, outputs, inputs = shape
        scales = torch.empty(*lead, -(-outputs // 128), -(-inputs // 128), dtype=torch.float32)
        return Fp8Blocks(torch.empty(shape, dtype=FP8), scales)


@dataclass(frozen=True)
class Fp8ChannelsLayout(Layout):
    """FP8 with a scale for each output, or for a whole tensor.

    Attributes:
        by_tensor: whether a tensor has one scale, which is expanded.
        static: whether the checkpoint has scales of activations.
        bound: FBGEMM's upper bound on the activation from which a token's scale is made.
    """

    by_tensor: bool = False
    static: bool = False
    bound: float | None = None
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "values": ("weight",),
        "scales": ("weight_scale", "weight_scale_inv"),
        "input_scale": ("input_scale", "activation_scale"),
        "bound": ("input_scale_ub",),
    }
    optional: ClassVar[frozenset[str]] = frozenset({"input_scale", "bound"})

    @property
    def name(self) -> str:
        unit = "fp8 by tensor" if self.by_tensor else "fp8 by channel"
        return f"{unit}, static activations" if self.static else unit

    def read(self, found: Mapping[str, Tensor], shape: torch.Size) -> Weight:
        check(found, "values", FP8, shape)
        *lead, outputs, _ = shape
        scales = self._scales(found["scales"], lead, outputs)
        static = None
        if self.static:
            if "input_scale" not in found:
                raise ValueError("input_scale is missing, and the config has static activations")
            static = one_each(found["input_scale"], "input_scale", lead)
        bound = self.bound
        if bound is not None and "bound" in found:
            bound = float(found["bound"].float().amax())
        return Fp8Channels(found["values"].contiguous(), scales, static, bound)

    def empty(self, shape: torch.Size) -> Weight:
        static = torch.empty(shape[:-2], dtype=torch.float32) if self.static else None
        scales = torch.empty(shape[:-1], dtype=torch.float32)
        return Fp8Channels(torch.empty(shape, dtype=FP8), scales, static, self.bound)

    def _scales(self, scales: Tensor, lead: list[int], outputs: int) -> Tensor:
        flat = scales.float().reshape(*lead, -1)
        if flat.shape[-1] not in (1, outputs):
            raise ValueError(f"scales of shape {tuple(scales.shape)} for {outputs} outputs")
        return flat.expand(*lead, outputs).contiguous()


def check(found: Mapping[str, Tensor], role: str, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> None:
    """See that a tensor is of a dtype and shape.

    Raises:
        ValueError: it is not.
    """
    tensor = found[role]
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{role}: expected {_shown(dtype)} of shape {tuple(shape)}, found {_shown(tensor.dtype)} of shape "
            f"{tuple(tensor.shape)}"
        )


def one_each(scale: Tensor, role: str, lead: list[int]) -> Tensor:
    """A scale for each module of a stack, as fp32.

    Raises:
        ValueError: there are more.
    """
    flat = scale.float().reshape(*lead, -1)
    if flat.shape[-1] != 1:
        raise ValueError(f"{role}: {flat.shape[-1]} scales where there is one for a module")
    return flat[..., 0].contiguous()


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
