"""The numbers of packed weights as floats, in registers, and exactly.

Four bytes or eight four-bit numbers lie in a word. Each place in a word is a plane: a tile of words gives four or eight
tiles of numbers of the same shape, so nothing moves between threads. Numbers are unpacked two to an instruction.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.backends.resolve import interpreting
from longreach_kernels.linear.assembly import (
    E2M1_BF16,
    E2M1_FP16,
    FP8_BF16,
    FP8_CONSTRAINTS,
    FP8_FP16,
    INT4_8_BF16,
    INT4_8_FP16,
    INT4_BF16,
    INT4_FP16,
    NIBBLE_CONSTRAINTS,
)

# What the constexpr FORMAT of the kernels is.
HALF: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(1)
INT4: tl.constexpr = tl.constexpr(2)
INT4_ZEROS: tl.constexpr = tl.constexpr(3)
MXFP4: tl.constexpr = tl.constexpr(4)
# The interpreter knows no assembler.
ASSEMBLED: tl.constexpr = tl.constexpr(not interpreting())


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """The floats whose bits are the low and the high half of words."""
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    return low, (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _fp8_pair(words, PLACE: tl.constexpr, dtype: tl.constexpr):
    """The e4m3 numbers PLACE and PLACE + 2 of each word, of 0 and 1, times 1 / `sum_factor`.

    They are made of their bits: the exponent and mantissa of e4m3 are the lowest bits of a wider float's exponent and
    the highest of its mantissa, below a bias that is smaller. What is subnormal in one is so in the other.
    """
    if dtype == tl.float32:
        low = words >> (8 * PLACE)
        high = words >> (8 * PLACE + 16)
        low = (((low & 0x7F) << 20) | ((low & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        high = (((high & 0x7F) << 20) | ((high & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        top = words << 8 if PLACE == 0 else words  # in the high byte of each half
        sign = top & -0x7FFF8000
        if dtype == tl.float16:
            low, high = _halves(((top >> 1) & 0x3F803F80) | sign, dtype)
        else:
            low, high = _halves(((top >> 4) & 0x07F007F0) | sign, dtype)
            low *= 1.152921504606847e18  # 2^60
            high *= 1.152921504606847e18
    return low, high


@triton.jit
def _int4_pair(words, PLACE: tl.constexpr, shift, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """The numbers PLACE and PLACE + 4 of each word, of 0 to 3, minus its zeros, times 1 / `sum_factor`. `shift` is
    of `int4_shift`."""
    if dtype == tl.float32:
        low = ((words >> (4 * PLACE)) & 15).to(tl.float32)
        high = ((words >> (4 * PLACE + 16)) & 15).to(tl.float32)
    elif dtype == tl.float16:
        low, high = _halves(((words >> (4 * PLACE)) & 0x000F000F) | 0x64006400, dtype)  # plus 1024
    else:
        low, high = _halves(((words >> (4 * PLACE)) & 0x000F000F) | 0x43004300, dtype)  # plus 128
    low -= shift
    high -= shift
    if FORMAT == INT4 and dtype == tl.bfloat16:
        low *= 0.015625  # 2^-6
        high *= 0.015625
    return low, high


@triton.jit
def int4_shift(zeros, dtype: tl.constexpr):
    """Zeros as `_int4_pair` takes them; exact."""
    if dtype == tl.float32:
        shift = zeros.to(tl.float32)
    elif dtype == tl.float16:
        shift = (zeros.to(tl.float32) + 1024.0).to(dtype)
    else:
        shift = (zeros.to(tl.float32) + 128.0).to(dtype)
    return shift


@triton.jit
def _e2m1_pair(words, PLACE: tl.constexpr, dtype: tl.constexpr):
    """The e2m1 numbers PLACE and PLACE + 4 of each word, of 0 to 3, made of their bits as in `_fp8_pair`: times 2^-14
    in fp16, 2^-126 in bf16, 1 in fp32."""
    if dtype == tl.float32:
        low = words >> (4 * PLACE)
        high = words >> (4 * PLACE + 16)
        low = (((low & 7) << 22) | ((low & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        high = (((high & 7) << 22) | ((high & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        sign = (words << (12 - 4 * PLACE)) & -0x7FFF8000
        if dtype == tl.float16:
            size = words << (9 - 4 * PLACE) if PLACE < 3 else words >> 3
            low, high = _halves((size & 0x0E000E00) | sign, dtype)
        else:
            size = words << (6 - 4 * PLACE) if PLACE < 2 else words >> (4 * PLACE - 6)
            low, high = _halves((size & 0x01C001C0) | sign, dtype)
    return low, high


@triton.jit
def _fp8_bits(words, dtype: tl.constexpr):
    """Four numbers of each word as `_fp8_pair` makes them, of two words at once: two numbers in a register for one
    instruction."""
    TEXT: tl.constexpr = FP8_FP16 if dtype == tl.float16 else FP8_BF16
    kind = dtype.value
    return tl.inline_asm_elementwise(
        TEXT, FP8_CONSTRAINTS, [words], dtype=(kind, kind, kind, kind), is_pure=True, pack=2
    )


@triton.jit
def _nibble_bits(words, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """As `_fp8_bits`, eight numbers as `_e2m1_pair` or `_int4_pair` makes them, these with the usual zero of 8, or if
    there are others, before zeros are subtracted."""
    if FORMAT == MXFP4:
        TEXT: tl.constexpr = E2M1_FP16 if dtype == tl.float16 else E2M1_BF16
    elif FORMAT == INT4:
        TEXT: tl.constexpr = INT4_8_FP16 if dtype == tl.float16 else INT4_8_BF16
    else:
        TEXT: tl.constexpr = INT4_FP16 if dtype == tl.float16 else INT4_BF16
    kind = dtype.value
    return tl.inline_asm_elementwise(
        TEXT,
        NIBBLE_CONSTRAINTS,
        [words],
        dtype=(kind, kind, kind, kind, kind, kind, kind, kind),
        is_pure=True,
        pack=2,
    )


@triton.jit
def e8m0_scales(bytes_, dtype: tl.constexpr):
    """Scales of e8m0 for numbers of `_e2m1_pair`, of which `sum_factor` lacks. Weights beyond 2^64 in bf16, or 2^5 in
    fp16, become infinite."""
    scale = bytes_.to(tl.int32)
    if dtype == tl.bfloat16:
        bits = tl.minimum(scale + 63, 255) << 7
        out = tl.where(scale == 255, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        more: tl.constexpr = 11 if dtype == tl.float16 else 0
        bits = tl.where(scale + more == 0, 0x00400000, tl.minimum(scale + more, 255) << 23)
        out = tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True).to(dtype)
    return out


@triton.jit
def sum_factor(FORMAT: tl.constexpr, dtype: tl.constexpr):
    """What sums of products are multiplied by, since the numbers above lack it: a power of 2."""
    factor = 1.0
    if FORMAT == FP8:
        if dtype == tl.float16:
            factor = 256.0
        elif dtype == tl.bfloat16:
            factor = 1.152921504606847e18  # 2^60
    elif FORMAT == INT4:
        if dtype == tl.bfloat16:
            factor = 64.0
    elif FORMAT == MXFP4:
        if dtype == tl.float16:
            factor = 8.0
        elif dtype == tl.bfloat16:
            factor = 9.223372036854776e18  # 2^63
    return factor


@triton.jit
def int4_shifts(zeros, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Shifts of int4 for loaded zeros."""
    if FORMAT == INT4_ZEROS:
        shifts = int4_shift(zeros, dtype)
    else:
        shifts = int4_shift(tl.full(zeros.shape, 8.0, tl.float32), dtype)
    return shifts


@triton.jit
def word_numbers(words, shifts, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """The four or eight numbers of each word, a tile of each place, times 1 / `sum_factor`. From int4 the zeros are
    taken off: `shifts` of `int4_shifts`, which fit the words."""
    if ASSEMBLED and dtype != tl.float32:
        if FORMAT == FP8:
            numbers = _fp8_bits(words, dtype)
        elif FORMAT != INT4_ZEROS:
            numbers = _nibble_bits(words, FORMAT, dtype)
        else:
            n0, n1, n2, n3, n4, n5, n6, n7 = _nibble_bits(words, FORMAT, dtype)
            numbers = (
                n0 - shifts,
                n1 - shifts,
                n2 - shifts,
                n3 - shifts,
                n4 - shifts,
                n5 - shifts,
                n6 - shifts,
                n7 - shifts,
            )
    elif FORMAT == FP8:
        n0, n2 = _fp8_pair(words, 0, dtype)
        n1, n3 = _fp8_pair(words, 1, dtype)
        numbers = (n0, n1, n2, n3)
    else:
        if FORMAT == MXFP4:
            n0, n4 = _e2m1_pair(words, 0, dtype)
            n1, n5 = _e2m1_pair(words, 1, dtype)
            n2, n6 = _e2m1_pair(words, 2, dtype)
            n3, n7 = _e2m1_pair(words, 3, dtype)
        else:
            n0, n4 = _int4_pair(words, 0, shifts, FORMAT, dtype)
            n1, n5 = _int4_pair(words, 1, shifts, FORMAT, dtype)
            n2, n6 = _int4_pair(words, 2, shifts, FORMAT, dtype)
            n3, n7 = _int4_pair(words, 3, shifts, FORMAT, dtype)
        numbers = (n0, n1, n2, n3, n4, n5, n6, n7)
    return numbers
