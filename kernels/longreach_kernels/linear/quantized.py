"""What all formats of weights have in common, and what their values are checked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Quantized(ABC):
    """What all formats have. Every method gives views where it can.

    Attributes:
        name: of the format, for messages.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(.., N, K), as the 16-bit weight would have it."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (.., N, K), computed in fp32, or fp64 if that is `dtype`, and rounded to `dtype` once."""

    @abstractmethod
    def outputs(self, start: int, stop: int) -> Self:
        """The outputs [start, stop).

        Raises:
            ValueError: a border cuts a block, or the outputs are not there.
        """

    @abstractmethod
    def inputs(self, start: int, stop: int) -> Self:
        """The inputs [start, stop).

        Raises:
            ValueError: a border cuts a block, a group or a word, or the inputs are not there.
        """

    def experts(self, start: int, stop: int) -> Self:
        """The experts [start, stop) of a weight (E, N, K).

        Raises:
            ValueError: the weight is not one of experts, or the experts are not there.
        """
        if len(self.shape) != 3:
            raise ValueError(f"{self.name}: a weight of shape {tuple(self.shape)} has no dimension of experts")
        check_range("experts", start, stop, self.shape[0], 1)
        return self.mapped(lambda x: x[start:stop])

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, by the names of their fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same with another tensor in the place of each."""
        return replace(self, **{name: function(x) for name, x in self.tensors().items()})

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return self.mapped(lambda x: x.to(device))

    @property
    def device(self) -> torch.device:
        """That of its tensors."""
        return next(iter(self.tensors().values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(x.numel() * x.itemsize for x in self.tensors().values())


def wide(dtype: torch.dtype) -> torch.dtype:
    """In what numbers of a dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_dtype(weight: Quantized, name: str, *dtypes: torch.dtype) -> None:
    """Raises ValueError if a tensor of the weight has none of these dtypes."""
    found = getattr(weight, name).dtype
    if found not in dtypes:
        raise ValueError(f"{weight.name}: {name} is {found}; it must be {' or '.join(map(str, dtypes))}")


def check_shape(weight: Quantized, name: str, wanted: Any) -> None:
    """Raises ValueError if a tensor of the weight has another shape."""
    found = getattr(weight, name).shape
    if tuple(found) != tuple(wanted):
        raise ValueError(f"{weight.name}: {name} has the shape {tuple(found)}; it must be {tuple(wanted)}")


def check_range(what: str, start: int, stop: int, size: int, step: int) -> None:
    """Raises ValueError if [start, stop) are not among `size`, or cut one of the steps."""
    if not 0 <= start < stop <= size:
        raise ValueError(f"{what} {start} to {stop} of {size} are not there")
    if start % step or (stop % step and stop != size):
        raise ValueError(f"{what} {start} to {stop} cut a block; split at multiples of {step}, on fewer ranks")
