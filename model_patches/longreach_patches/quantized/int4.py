"""Layouts of four-bit integers in groups: compressed-tensors' pack-quantized, GPTQ and AWQ.

All three pack eight numbers into an int32. They differ in the dimension along which they pack, in the order of the
eight, and in how zeros are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from longreach_kernels.linear import Int4Groups, Weight
from torch import Tensor

from longreach_patches.quantized.layouts import Layout, check

_PER_WORD = 8
_SYMMETRIC_ZERO = 8
# The outputs of a word's numbers in AWQ's files for GEMM, from the lowest bits up.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Int4Layout(Layout):
    """What the three share.

    Attributes:
        group: inputs that share a scale; None for all of an output.
        symmetric: whether all zeros are 8, and need not be kept.
        ordered: whether a module's inputs may be in an order of their own (GPTQ's activation order).
    """

    group: int | None
    symmetric: bool
    ordered: bool = False

    @property
    def name(self) -> str:
        unit = "by channel" if self.group is None else f"in groups of {self.group}"
        return f"int4 {unit}, {'symmetric' if self.symmetric else 'asymmetric'}"

    def empty(self, shape: torch.Size) -> Weight:
        *lead, outputs, inputs = shape
        groups = self._groups(inputs)
        zeros = None if self.symmetric else torch.empty(*lead, outputs, groups, dtype=torch.uint8)
        return Int4Groups(
            torch.empty(*lead, outputs, inputs // _PER_WORD, dtype=torch.int32),
            torch.empty(*lead, outputs, groups, dtype=torch.bfloat16),
            zeros,
            torch.empty(inputs, dtype=torch.int64) if self.ordered else None,
        )

    def _groups(self, inputs: int) -> int:
        group = self.group or inputs
        if inputs % group or group % _PER_WORD:
            raise ValueError(f"{inputs} inputs cannot be in groups of {group}, which must be multiples of {_PER_WORD}")
        return inputs // group

    def _made(self, packed: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None) -> Int4Groups:
        """The value; `packed` (.., N, K / 8) is in the inputs' order, `order` is the group of each input or None."""
        made = Int4Groups(packed.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous())
        permutation = None if order is None else self._permutation(order, made)
        if permutation is None:
            return made
        numbers = made.numbers()[..., permutation]
        return Int4Groups.pack(numbers, made.scales, made.zeros, permutation)

    @staticmethod
    def _permutation(order: Tensor, made: Int4Groups) -> Tensor | None:
        """The inputs group by group; None where they are so already.

        Raises:
            ValueError: groups are not of one size, or there are several experts.
        """
        inputs = made.shape[-1]
        expected = torch.arange(inputs, device=order.device) // made.group
        if bool((order == expected).all()) or bool((order < 0).all()):  # -1 where no order was made
            return None
        if order.dim() > 1:
            raise ValueError("experts with inputs in activation order are not computed; use one without desc_act")
        permutation = torch.argsort(order, stable=True)
        if not torch.equal(order[permutation].to(expected.dtype), expected):
            raise ValueError(f"g_idx: its groups are not of {made.group} inputs each")
        return permutation


@dataclass(frozen=True)
class PackQuantizedLayout(Int4Layout):
    """compressed-tensors' pack-quantized: along inputs, lowest bits first; zeros along outputs."""

    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "packed": ("weight_packed",),
        "scales": ("weight_scale",),
        "zeros": ("weight_zero_point",),
        "order": ("weight_g_idx",),
        "shape": ("weight_shape",),
    }
    optional: ClassVar[frozenset[str]] = frozenset({"zeros", "order", "shape"})

    def read(self, found: Mapping[str, Tensor], shape: torch.Size) -> Weight:
        *lead, outputs, inputs = shape
        groups = self._groups(inputs)
        check(found, "packed", torch.int32, (*lead, outputs, inputs // _PER_WORD))
        check(found, "scales", found["scales"].dtype, (*lead, outputs, groups))
        zeros = None
        if not self.symmetric:
            if "zeros" not in found:
                raise ValueError("weight_zero_point is missing, and the config has asymmetric weights")
            check(found, "zeros", torch.int32, (*lead, -(-outputs // _PER_WORD), groups))
            zeros = unpacked(found["zeros"].transpose(-1, -2)).transpose(-1, -2)[..., :outputs, :]
        return self._made(found["packed"], found["scales"], zeros, found.get("order"))


@dataclass(frozen=True)
class GptqLayout(Int4Layout):
    """GPTQ: weights (inputs, outputs), packed along inputs, lowest bits first; zeros along outputs.

    Attributes:
        zeros_less_one: whether zeros are stored less one (the first version of the format).
    """

    zeros_less_one: bool = True
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "packed": ("qweight",),
        "scales": ("scales",),
        "zeros": ("qzeros",),
        "order": ("g_idx",),
    }
    optional: ClassVar[frozenset[str]] = frozenset({"order"})

    def read(self, found: Mapping[str, Tensor], shape: torch.Size) -> Weight:
        *lead, outputs, inputs = shape
        groups = self._groups(inputs)
        check(found, "packed", torch.int32, (*lead, inputs // _PER_WORD, outputs))
        check(found, "scales", found["scales"].dtype, (*lead, groups, outputs))
        check(found, "zeros", torch.int32, (*lead, groups, -(-outputs // _PER_WORD)))
        zeros = unpacked(found["zeros"])[..., :outputs]
        if self.zeros_less_one:
            zeros = (zeros + 1) & 15
        kept = zeros.transpose(-1, -2)
        if self.symmetric and bool((zeros == _SYMMETRIC_ZERO).all()):
            kept = None
        packed, scales = (found[role].transpose(-1, -2) for role in ("packed", "scales"))
        return self._made(packed, scales, kept, found.get("order"))


@dataclass(frozen=True)
class AwqLayout(Int4Layout):
    """AWQ for GEMM: weights (inputs, outputs), packed along outputs in an order of their own; zeros likewise."""

    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "packed": ("qweight",),
        "scales": ("scales",),
        "zeros": ("qzeros",),
    }

    def read(self, found: Mapping[str, Tensor], shape: torch.Size) -> Weight:
        *lead, outputs, inputs = shape
        groups = self._groups(inputs)
        if outputs % _PER_WORD:
            raise ValueError(f"{outputs} outputs; they must be a multiple of {_PER_WORD}")
        check(found, "packed", torch.int32, (*lead, inputs, outputs // _PER_WORD))
        check(found, "scales", found["scales"].dtype, (*lead, groups, outputs))
        check(found, "zeros", torch.int32, (*lead, groups, outputs // _PER_WORD))
        packed = _of_each(found["packed"], lead)
        zeros = _in_order(found["zeros"]).transpose(-1, -2)
        return self._made(packed, found["scales"].transpose(-1, -2), zeros, None)


def unpacked(words: Tensor) -> Tensor:
    """The four-bit numbers (.., 8 W) uint8 of int32 words (.., W), lowest bits first."""
    places = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> places).bitwise_and_(15).to(torch.uint8).flatten(-2)


def _in_order(words: Tensor) -> Tensor:
    """AWQ's numbers (.., 8 W) in the order of outputs."""
    places = torch.tensor(_AWQ_ORDER, device=words.device).argsort()
    return unpacked(words).unflatten(-1, (-1, _PER_WORD))[..., places].flatten(-2)


def _of_each(words: Tensor, lead: list[int]) -> Tensor:
    """AWQ's words (.., K, N / 8) as (.., N, K / 8), one module after another: what lies between takes memory."""
    if lead:
        return torch.stack([_of_each(one, []) for one in words])
    numbers = _in_order(words).T
    return Int4Groups.pack(numbers, torch.ones(len(numbers), 1, device=words.device)).packed
