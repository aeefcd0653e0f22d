"""What the weight of a linear layer is made of: a 16-bit tensor, or small numbers with scales, as a value.

N are outputs and K inputs. Weights of experts have a leading dimension E in every tensor. Readers of checkpoints make
these values once; kernels know these layouts and no others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Eight bits of exponent and none of sign or mantissa (OCP Microscaling Formats 1.0): 2^(byte - 127), and 255 for NaN.
E8M0_BIAS, E8M0_NAN = 127, 255
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


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
        _check_range("experts", start, stop, self.shape[0], 1)
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


@dataclass(frozen=True, eq=False)
class Fp8Blocks(Quantized):
    """FP8 with a scale for each block of outputs and inputs (DeepSeek-V3, Qwen3, GLM, MiniMax).

    Activations are quantised by token and 128 inputs where a product has many rows.

    Attributes:
        values: (.., N, K) float8_e4m3fn.
        scales: (.., ceil(N / rows of a block), ceil(K / columns of a block)) float32; the weight is value times scale.
        block: outputs and inputs of a block. Joined projections may have blocks of fewer outputs: see `join_outputs`.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int] = (128, 128)
    name: ClassVar[str] = "fp8 blocks"

    def __post_init__(self) -> None:
        _check_dtype(self, "values", FP8)
        _check_dtype(self, "scales", torch.float32)
        *lead, outputs, inputs = self.values.shape
        wanted = (*lead, -(-outputs // self.block[0]), -(-inputs // self.block[1]))
        _check_shape(self, "scales", wanted)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = _wide(dtype)
        outputs, inputs = self.shape[-2:]
        scales = self.scales.to(wide).repeat_interleave(self.block[0], -2)[..., :outputs, :]
        scales = scales.repeat_interleave(self.block[1], -1)[..., :inputs]
        return (self.values.to(wide) * scales).to(dtype)

    def outputs(self, start: int, stop: int) -> Fp8Blocks:
        rows = self.block[0]
        _check_range(f"{self.name}: outputs", start, stop, self.shape[-2], rows)
        scales = self.scales[..., start // rows : -(-stop // rows), :]
        return replace(self, values=self.values[..., start:stop, :], scales=scales)

    def inputs(self, start: int, stop: int) -> Fp8Blocks:
        columns = self.block[1]
        _check_range(f"{self.name}: inputs", start, stop, self.shape[-1], columns)
        scales = self.scales[..., start // columns : -(-stop // columns)]
        return replace(self, values=self.values[..., start:stop], scales=scales)

    def with_rows(self, rows: int) -> Fp8Blocks:
        """The same weight in blocks of fewer outputs, a divisor of those now, with repeated scales."""
        if rows == self.block[0]:
            return self
        count = -(-self.shape[-2] // rows)
        scales = self.scales.repeat_interleave(self.block[0] // rows, -2)[..., :count, :].contiguous()
        return replace(self, scales=scales, block=(rows, self.block[1]))


@dataclass(frozen=True, eq=False)
class Fp8Channels(Quantized):
    """FP8 with a scale for each output (compressed-tensors, FBGEMM). A scale of a whole tensor is expanded.

    Activations are quantised where a product has many rows: by token, or by one scale that the checkpoint brings.

    Attributes:
        values: (.., N, K) float8_e4m3fn.
        scales: (.., N) float32; the weight is value times scale.
        input_scale: (..,) float32, static: an activation's value is it divided by this. None: by token.
        input_bound: upper bound on the greatest activation from which a token's scale is made (FBGEMM's); None: none.
    """

    values: Tensor
    scales: Tensor
    input_scale: Tensor | None = None
    input_bound: float | None = None
    name: ClassVar[str] = "fp8 channels"

    def __post_init__(self) -> None:
        _check_dtype(self, "values", FP8)
        _check_dtype(self, "scales", torch.float32)
        _check_shape(self, "scales", self.values.shape[:-1])
        if self.input_scale is not None:
            _check_dtype(self, "input_scale", torch.float32)
            _check_shape(self, "input_scale", self.values.shape[:-2])

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = _wide(dtype)
        return (self.values.to(wide) * self.scales.to(wide)[..., None]).to(dtype)

    def outputs(self, start: int, stop: int) -> Fp8Channels:
        _check_range(f"{self.name}: outputs", start, stop, self.shape[-2], 1)
        return replace(self, values=self.values[..., start:stop, :], scales=self.scales[..., start:stop])

    def inputs(self, start: int, stop: int) -> Fp8Channels:
        _check_range(f"{self.name}: inputs", start, stop, self.shape[-1], 1)
        return replace(self, values=self.values[..., start:stop])


@dataclass(frozen=True, eq=False)
class Int4Groups(Quantized):
    """Unsigned four-bit numbers with a scale, and maybe a zero, for each output and group of inputs (GPTQ, AWQ, and
    compressed-tensors' pack-quantized). Activations stay in 16 bits.

    Attributes:
        packed: (.., N, K / 8) int32, each eight inputs in ascending order, the first in the lowest bits.
        scales: (.., N, K / G) fp16, bf16 or fp32; the weight is (number - zero) times scale.
        zeros: (.., N, K / G) uint8; None: 8 for all.
        permutation: (K,) int64: column k belongs to input ``permutation[k]`` (GPTQ's activation order); None: to k.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    permutation: Tensor | None = None
    name: ClassVar[str] = "int4 groups"

    def __post_init__(self) -> None:
        _check_dtype(self, "packed", torch.int32)
        _check_dtype(self, "scales", *_SCALES)
        *lead, outputs, words = self.packed.shape
        groups = self.scales.shape[-1]
        if not groups or words * 8 % groups or words * 8 // groups % 8:
            raise ValueError(f"{self.name}: {words * 8} inputs in {groups} groups; a group is a multiple of 8 inputs")
        _check_shape(self, "scales", (*lead, outputs, groups))
        if self.zeros is not None:
            _check_dtype(self, "zeros", torch.uint8)
            _check_shape(self, "zeros", self.scales.shape)
        if self.permutation is not None:
            _check_dtype(self, "permutation", torch.int64)
            _check_shape(self, "permutation", (words * 8,))

    @classmethod
    def pack(
        cls, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None, permutation: Tensor | None = None
    ) -> Int4Groups:
        """From numbers (.., N, K) of 0 to 15, of any integer type; K is a multiple of 8."""
        words = numbers.to(torch.int32).unflatten(-1, (-1, 8))
        packed = torch.zeros(words.shape[:-1], dtype=torch.int32, device=numbers.device)
        for place in range(8):  # one at a time: a sum over all would take eight times the memory
            packed |= words[..., place] << (4 * place)
        return cls(packed, scales, zeros, permutation)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 8))

    @property
    def group(self) -> int:
        """G, inputs that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    def numbers(self) -> Tensor:
        """(.., N, K) uint8, in the order in which they are packed."""
        places = torch.arange(0, 32, 4, dtype=torch.int32, device=self.device)
        return (self.packed[..., None] >> places).bitwise_and_(15).to(torch.uint8).flatten(-2)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = _wide(dtype)
        grouped = self.numbers().to(wide).unflatten(-1, (-1, self.group))
        zeros = 8 if self.zeros is None else self.zeros.to(wide)[..., None]
        weight = ((grouped - zeros) * self.scales.to(wide)[..., None]).flatten(-2).to(dtype)
        return weight if self.permutation is None else weight[..., self.permutation.argsort()]

    def outputs(self, start: int, stop: int) -> Int4Groups:
        _check_range(f"{self.name}: outputs", start, stop, self.shape[-2], 1)
        zeros = None if self.zeros is None else self.zeros[..., start:stop, :]
        return replace(
            self, packed=self.packed[..., start:stop, :], scales=self.scales[..., start:stop, :], zeros=zeros
        )

    def inputs(self, start: int, stop: int) -> Int4Groups:
        if self.permutation is not None:
            raise ValueError(
                f"{self.name}: inputs in activation order cannot be split; "
                "use one rank, or a checkpoint without desc_act"
            )
        _check_range(f"{self.name}: inputs", start, stop, self.shape[-1], self.group)
        some = slice(start // self.group, stop // self.group)
        zeros = None if self.zeros is None else self.zeros[..., some]
        return replace(
            self, packed=self.packed[..., start // 8 : stop // 8], scales=self.scales[..., some], zeros=zeros
        )

    def experts(self, start: int, stop: int) -> Int4Groups:
        if self.permutation is not None:
            raise ValueError(f"{self.name}: experts have no inputs in activation order")
        return super().experts(start, stop)


@dataclass(frozen=True, eq=False)
class Mxfp4(Quantized):
    """Four-bit floats with a scale for each 32 inputs (OCP Microscaling Formats 1.0; gpt-oss). Activations stay in 16
    bits.

    Attributes:
        packed: (.., N, K / 2) uint8, each two e2m1 numbers of neighbouring inputs, the first in the low bits.
        scales: (.., N, K / 32) uint8, e8m0: the weight is number times 2^(scale - 127). 255 is NaN, which makes all 32
            weights NaN.
    """

    packed: Tensor
    scales: Tensor
    name: ClassVar[str] = "mxfp4"
    group: ClassVar[int] = 32

    def __post_init__(self) -> None:
        _check_dtype(self, "packed", torch.uint8)
        _check_dtype(self, "scales", torch.uint8)
        *lead, outputs, pairs = self.packed.shape
        if pairs * 2 % self.group:
            raise ValueError(f"{self.name}: {pairs * 2} inputs; they must be a multiple of {self.group}")
        _check_shape(self, "scales", (*lead, outputs, pairs * 2 // self.group))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = _wide(dtype)
        table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=wide, device=self.device)
        pairs = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(-2)
        scales = torch.exp2(self.scales.to(wide) - E8M0_BIAS)
        scales = scales.masked_fill(self.scales == E8M0_NAN, torch.nan)
        grouped = table[pairs.int()].unflatten(-1, (-1, self.group))
        return (grouped * scales[..., None]).flatten(-2).to(dtype)

    def outputs(self, start: int, stop: int) -> Mxfp4:
        _check_range(f"{self.name}: outputs", start, stop, self.shape[-2], 1)
        return self.mapped(lambda x: x[..., start:stop, :])

    def inputs(self, start: int, stop: int) -> Mxfp4:
        _check_range(f"{self.name}: inputs", start, stop, self.shape[-1], self.group)
        scales = self.scales[..., start // self.group : stop // self.group]
        return replace(self, packed=self.packed[..., start // 2 : stop // 2], scales=scales)


Weight = Tensor | Fp8Blocks | Fp8Channels | Int4Groups | Mxfp4


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_dtype(weight: Quantized, name: str, *dtypes: torch.dtype) -> None:
    found = getattr(weight, name).dtype
    if found not in dtypes:
        raise ValueError(f"{weight.name}: {name} is {found}; it must be {' or '.join(map(str, dtypes))}")


def _check_shape(weight: Quantized, name: str, wanted: Any) -> None:
    found = getattr(weight, name).shape
    if tuple(found) != tuple(wanted):
        raise ValueError(f"{weight.name}: {name} has the shape {tuple(found)}; it must be {tuple(wanted)}")


def _check_range(what: str, start: int, stop: int, size: int, step: int) -> None:
    if not 0 <= start < stop <= size:
        raise ValueError(f"{what} {start} to {stop} of {size} are not there")
    if start % step or (stop % step and stop != size):
        raise ValueError(f"{what} {start} to {stop} cut a block; split at multiples of {step}, on fewer ranks")
