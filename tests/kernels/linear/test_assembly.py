"""The instructions that unpack words make the numbers that the formats have, for every word that there may be."""

from __future__ import annotations

import re

import pytest
import torch
from longreach_kernels.linear import assembly
from longreach_kernels.linear.formats import E2M1
from torch import Tensor

_KINDS = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def _bits(value: str, registers: dict[str, Tensor]) -> Tensor:
    return registers[value] if value in registers else torch.tensor(int(value, 0))


def _prmt(a: Tensor, b: Tensor, selector: int) -> Tensor:
    out = torch.zeros_like(a)
    for place in range(4):
        choice = selector >> 4 * place & 15
        byte = (b if choice & 4 else a) >> 8 * (choice & 3) & 255
        if choice & 8:
            byte = (byte >> 7) * 255
        out |= byte << 8 * place
    return out


def _fma(a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype) -> Tensor:
    def halves(x: Tensor) -> list[Tensor]:
        return [(x >> 16 * i & 0xFFFF).to(torch.uint16).view(dtype).double() for i in range(2)]

    low, high = (
        (x * y + z).to(dtype).view(torch.uint16).long() for x, y, z in zip(*map(halves, (a, b, c)), strict=True)
    )
    return low | high << 16


def run(text: str, first: Tensor, second: Tensor, places: int) -> list[Tensor]:
    """The result registers (int64) of a text for words (int64); every instruction that the texts have, and no other."""
    registers = {f"${places}": first, f"${places + 1}": second}
    for instruction in re.findall(r"([a-z][\w.]+ [^;{}]*);", text):
        name, _, operands = instruction.partition(" ")
        if name == ".reg" or name.startswith("reg"):
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [_bits(source, registers) for source in sources]
        kind = name.split(".")
        if kind[0] == "prmt":
            out = _prmt(values[0], values[1], int(values[2]))
        elif kind[0] == "shl":
            out = values[0] << values[1] & 0xFFFFFFFF
        elif kind[0] == "shr":
            out = values[0] >> values[1]
        elif kind[0] == "and":
            out = values[0] & values[1]
        elif kind[0] == "mov":
            out = values[0]
        elif kind[0] == "lop3":
            assert int(values[3]) == 0xEA
            out = values[0] & values[1] | values[2]
        else:
            assert kind[0] == "fma", instruction
            out = _fma(values[0], values[1], torch.broadcast_to(values[2], values[0].shape), _KINDS[kind[2]])
        registers[target] = out
    return [registers[f"${place}"] for place in range(places)]


def numbers(text: str, places: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of words of random bits, and all bytes at each place: the words (2, n), and numbers (places, 2, n) in fp64."""
    every = torch.arange(256).repeat_interleave(4) << 8 * torch.arange(4).repeat(256)
    words = torch.cat([torch.randint(1 << 32, (20000,)), every])
    words = torch.stack((words, words.flip(0)))
    registers = torch.stack(run(text, words[0], words[1], places))
    halves = torch.stack((registers & 0xFFFF, registers >> 16), 1)
    return words, halves.to(torch.uint16).view(dtype).double()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 2.0**-8), (torch.bfloat16, 2.0**-60)], ids=str)
def test_fp8(dtype: torch.dtype, factor: float) -> None:
    text = assembly.FP8_FP16 if dtype == torch.float16 else assembly.FP8_BF16
    words, found = numbers(text.value, 4, dtype)
    for place in range(4):
        bytes_ = (words >> 8 * place & 255).to(torch.uint8)
        expected = bytes_.view(torch.float8_e4m3fn).double() * factor
        there = ~expected.isnan()
        assert torch.equal(found[place][there], expected[there])
        assert torch.equal(found[place].signbit()[there], expected.signbit()[there])


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 2.0**-14), (torch.bfloat16, 2.0**-126)], ids=str)
def test_e2m1(dtype: torch.dtype, factor: float) -> None:
    text = assembly.E2M1_FP16 if dtype == torch.float16 else assembly.E2M1_BF16
    words, found = numbers(text.value, 8, dtype)
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64) * factor
    for place in range(8):
        assert torch.equal(found[place], table[words >> 4 * place & 15])


@pytest.mark.parametrize(
    ("name", "dtype", "summand", "factor"),
    [
        ("INT4_FP16", torch.float16, 1024, 1.0),
        ("INT4_BF16", torch.bfloat16, 128, 1.0),
        ("INT4_8_FP16", torch.float16, -8, 1.0),
        ("INT4_8_BF16", torch.bfloat16, -8, 2.0**-6),
    ],
)
def test_int4(name: str, dtype: torch.dtype, summand: int, factor: float) -> None:
    words, found = numbers(getattr(assembly, name).value, 8, dtype)
    for place in range(8):
        assert torch.equal(found[place], ((words >> 4 * place & 15).double() + summand) * factor)
