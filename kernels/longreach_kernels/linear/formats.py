"""What the weight of a linear layer is made of: a 16-bit tensor, or small numbers with scales, as a value.

N are outputs and K inputs. Weights of experts have a leading dimension E in every tensor. Readers of checkpoints make
these values once; kernels know these layouts and no others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from longreach_kernels.linear.quantized import Quantized, check_dtype, check_range, check_shape, wide

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Eight bits of exponent and none of sign or mantissa (OCP Microscaling Formats 1.0): 2^(byte - 127), and 255 for NaN.
E8M0_BIAS, E8M0_NAN = 127, 255
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


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
        check_dtype(self, "values", FP8)
        check_dtype(self, "scales", torch.float32)
        *lead, outputs, inputs = self.values.shape
        wanted = (*lead, -(-outputs // self.block[0]), -(-inputs // self.block[1]))
        check_shape(self, "scales", wanted)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        exact = wide(dtype)
        outputs, inputs = self.shape[-2:]
        scales = self.scales.to(exact).repeat_interleave(self.block[0], -2)[..., :outputs, :]
        scales = scales.repeat_interleave(self.block[1], -1)[..., :inputs]
        return (self.values.to(exact) * scales).to(dtype)

    def outputs(self, start: int, stop: int) -> Fp8Blocks:
        rows = self.block[0]
        check_range(f"{self.name}: outputs", start, stop, self.shape[-2], rows)
        scales = self.scales[..., start // rows : -(-stop // rows), :]
        return replace(self, values=self.values[..., start:stop, :], scales=scales)

    def inputs(self, start: int, stop: int) -> Fp8Blocks:
        columns = self.block[1]
        check_range(f"{self.name}: inputs", start, stop, self.shape[-1], columns)
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
        check_dtype(self, "values", FP8)
        check_dtype(self, "scales", torch.float32)
        check_shape(self, "scales", self.values.shape[:-1])
        if self.input_scale is not None:
            check_dtype(self, "input_scale", torch.float32)
            check_shape(self, "input_scale", self.values.shape[:-2])

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        exact = wide(dtype)
        return (self.values.to(exact) * self.scales.to(exact)[..., None]).to(dtype)

    def outputs(self, start: int, stop: int) -> Fp8Channels:
        check_range(f"{self.name}: outputs", start, stop, self.shape[-2], 1)
        return replace(self, values=self.values[..., start:stop, :], scales=self.scales[..., start:stop])

    def inputs(self, start: int, stop: int) -> Fp8Channels:
        check_range(f"{self.name}: inputs", start, stop, self.shape[-1], 1)
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
        check_dtype(self, "packed", torch.int32)
        check_dtype(self, "scales", *_SCALES)
        *lead, outputs, words = self.packed.shape
        groups = self.scales.shape[-1]
        if not groups or words * 8 % groups or words * 8 // groups % 8:
            raise ValueError(f"{self.name}: {words * 8} inputs in {groups} groups; a group is a multiple of 8 inputs")
        check_shape(self, "scales", (*lead, outputs, groups))
        if self.zeros is not None:
            check_dtype(self, "zeros", torch.uint8)
            check_shape(self, "zeros", self.scales.shape)
        if self.permutation is not None:
            check_dtype(self, "permutation", torch.int64)
            check_shape(self, "permutation", (words * 8,))

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
        exact = wide(dtype)
        grouped = self.numbers().to(exact).unflatten(-1, (-1, self.group))
        zeros = 8 if self.zeros is None else self.zeros.to(exact)[..., None]
        weight = ((grouped - zeros) * self.scales.to(exact)[..., None]).flatten(-2).to(dtype)
        return weight if self.permutation is None else weight[..., self.permutation.argsort()]

    def outputs(self, start: int, stop: int) -> Int4Groups:
        check_range(f"{self.name}: outputs", start, stop, self.shape[-2], 1)
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
        check_range(f"{self.name}: inputs", start, stop, self.shape[-1], self.group)
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
        check_dtype(self, "packed", torch.uint8)
        check_dtype(self, "scales", torch.uint8)
        *lead, outputs, pairs = self.packed.shape
        if pairs * 2 % self.group:
            raise ValueError(f"{self.name}: {pairs * 2} inputs; they must be a multiple of {self.group}")
        check_shape(self, "scales", (*lead, outputs, pairs * 2 // self.group))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        exact = wide(dtype)
        table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=exact, device=self.device)
        pairs = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(-2)
        scales = torch.exp2(self.scales.to(exact) - E8M0_BIAS)
        scales = scales.masked_fill(self.scales == E8M0_NAN, torch.nan)
        grouped = table[pairs.int()].unflatten(-1, (-1, self.group))
        return (grouped * scales[..., None]).flatten(-2).to(dtype)

    def outputs(self, start: int, stop: int) -> Mxfp4:
        check_range(f"{self.name}: outputs", start, stop, self.shape[-2], 1)
        return self.mapped(lambda x: x[..., start:stop, :])

    def inputs(self, start: int, stop: int) -> Mxfp4:
        check_range(f"{self.name}: inputs", start, stop, self.shape[-1], self.group)
        scales = self.scales[..., start // self.group : stop // self.group]
        return replace(self, packed=self.packed[..., start // 2 : stop // 2], scales=scales)


Weight = Tensor | Fp8Blocks | Fp8Channels | Int4Groups | Mxfp4
