"""The instructions that unpack two words at once, as texts for Triton's inline assembly.

Each register of a result has a place of the first word in its low half and the same place of the second word in its
high half, made of their bits as `unpack` describes. The first operands are results, one a place; the last two are the
words. 0xEA is `(a & b) | c`. Shifts to the left are preferred: they run beside the units for logic, as products do.

`prmt` with 8 added to a place gives a byte of the sign of that byte. A byte below such a one is, after a shift, a float
whose sign, exponent and mantissa one mask leaves.
"""

from __future__ import annotations

import triton.language as tl

_FP8_PLACES, _NIBBLES = 4, 8


def _text(places: int, start: str, lines: list[str]) -> tl.constexpr:
    """A text of some instructions, then a line a place, with {0} and {1} for the words."""
    words = f"${places}", f"${places + 1}"
    body = "\n".join([start, *lines]).format(*words)
    return tl.constexpr("{ .reg .b32 a, b, t, c, z, d, y;\n" + body + "\n}")


def _signed(byte: int) -> str:
    """The selector of a byte of each word, below a byte of its sign."""
    return f"0x{0xC480 + 0x1111 * byte:X}"


def _fp8(shift: int, mask: int, factor: str | None) -> tl.constexpr:
    lines = []
    for place in range(_FP8_PLACES):
        line = f"prmt.b32 t, {{0}}, {{1}}, {_signed(place)}; shl.b32 t, t, {shift}; "
        if factor is None:
            line += f"and.b32 ${place}, t, 0x{mask:X};"
        else:
            line += f"and.b32 t, t, 0x{mask:X}; fma.rn.bf16x2 ${place}, t, c, z;"
        lines.append(line)
    start = "" if factor is None else f"mov.b32 c, {factor}; mov.b32 z, 0x80008000;"  # the sum with -0 keeps -0
    return _text(_FP8_PLACES, start, lines)


def _e2m1(shift: int, mask: int) -> tl.constexpr:
    lines = []
    for place in range(_NIBBLES):
        words = "{0}, {1}" if place % 2 else "a, b"  # in the upper half of a byte, or brought there
        line = f"prmt.b32 t, {words}, {_signed(place // 2)}; shl.b32 t, t, {shift}; and.b32 ${place}, t, 0x{mask:X};"
        lines.append(line)
    return _text(_NIBBLES, "shl.b32 a, {0}, 4; shl.b32 b, {1}, 4;", lines)


def _int4(kind: str, number: str, low: str, high: str) -> tl.constexpr:
    """A byte of each word has two places. `number` is a float that they are added to by their bits. `low` and `high`
    are a factor and a summand that make what is wanted of it; none where it is that already."""
    lines = []
    for place in range(_NIBBLES):
        after, mask = (high, "0x00F000F0") if place % 2 else (low, "0x000F000F")
        line = "" if place % 2 else f"prmt.b32 a, {{0}}, {{1}}, 0x{0x4400 + 0x1111 * (place // 2):X}; "
        line += f"lop3.b32 {'t' if after else f'${place}'}, a, {mask}, {number}, 0xEA;"
        if after:
            line += f" fma.rn.{kind} ${place}, t, {'d, y' if place % 2 else 'c, z'};"
        lines.append(line)
    constants = zip("czdy", (low or "0 0").split() + high.split(), strict=True)
    return _text(_NIBBLES, " ".join(f"mov.b32 {name}, {value};" for name, value in constants), lines)


def _int4_shifted(number: str) -> tl.constexpr:
    """`number` has no room for places above the lowest: the others are shifted there."""
    lines = []
    for place in range(_NIBBLES):
        source, line = "ab"[place // 4], ""
        if place % 4:
            line, source = f"shr.b32 t, {source}, {4 * (place % 4)}; ", "t"
        lines.append(line + f"lop3.b32 ${place}, {source}, 0x000F000F, {number}, 0xEA;")
    return _text(_NIBBLES, "prmt.b32 a, {0}, {1}, 0x5410; prmt.b32 b, {0}, {1}, 0x7632;", lines)


def _constraints(places: int) -> tl.constexpr:
    return tl.constexpr(",".join(["=r"] * places + ["r", "r"]))


FP8_CONSTRAINTS: tl.constexpr = _constraints(_FP8_PLACES)
NIBBLE_CONSTRAINTS: tl.constexpr = _constraints(_NIBBLES)
FP8_FP16: tl.constexpr = _fp8(7, 0xBF80BF80, None)
FP8_BF16: tl.constexpr = _fp8(4, 0x87F087F0, "0x5D805D80")  # 2^60
E2M1_FP16: tl.constexpr = _e2m1(5, 0x8E008E00)
E2M1_BF16: tl.constexpr = _e2m1(2, 0x81C081C0)
INT4_FP16: tl.constexpr = _int4("f16x2", "0x64006400", "", "0x2C002C00 0x63806380")  # plus 1024
INT4_BF16: tl.constexpr = _int4_shifted("0x43004300")  # plus 128
INT4_8_FP16: tl.constexpr = _int4("f16x2", "0x64006400", "0x3C003C00 0xE408E408", "0x2C002C00 0xD480D480")  # minus 8
# The lowest 8 bits of bf16 are a number times 2^-133, subnormal or not. The greatest factor is 2^127, and makes it
# one times 2^-6.
INT4_8_BF16: tl.constexpr = _int4("bf16x2", "0", "0x7F007F00 0xBE00BE00", "0x7D007D00 0xBE00BE00")
