"""Products of a weight of any format with few rows, for the loops of kernels: plain layers, and experts.

The weight is the left operand, and the rows are columns of the result: a weight is loaded, unpacked and multiplied
in the registers of one thread, in the layout that the tensor cores take. Unpacked weights are never written to shared
memory: each plane of `unpack` is multiplied with every fourth or eighth input.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.linear.unpack import (
    FP8,
    HALF,
    INT4,
    INT4_ZEROS,
    MXFP4,
    e8m0_scales,
    int4_shifts,
    sum_factor,
    word_numbers,
)


@triton.jit
def _planes_of_4(x, SLICES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Of rows (SLICES, ROWS, STEP) four tiles (SLICES, STEP / 4, ROWS): every fourth input, from the first on, from the
    second on, .."""
    even, odd = tl.split(tl.reshape(x, (SLICES, ROWS, STEP // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0.permute(0, 2, 1), x1.permute(0, 2, 1), x2.permute(0, 2, 1), x3.permute(0, 2, 1)


@triton.jit
def _planes_of_8(x, SLICES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """As `_planes_of_4`, eight tiles: every eighth input."""
    even, odd = tl.split(tl.reshape(x, (SLICES, ROWS, STEP // 8, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return (
        x0.permute(0, 2, 1),
        x1.permute(0, 2, 1),
        x2.permute(0, 2, 1),
        x3.permute(0, 2, 1),
        x4.permute(0, 2, 1),
        x5.permute(0, 2, 1),
        x6.permute(0, 2, 1),
        x7.permute(0, 2, 1),
    )


@triton.jit
def _planes(x, FORMAT: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    if FORMAT == FP8:
        planes = _planes_of_4(x, SLICES, ROWS, STEP)
    else:
        planes = _planes_of_8(x, SLICES, ROWS, STEP)
    return planes


@triton.jit
def spread(values, WIDTH: tl.constexpr):
    """Values (.., GROUPS), of three dims, for each of WIDTH words or inputs (.., WIDTH)."""
    first: tl.constexpr = values.shape[0]
    second: tl.constexpr = values.shape[1]
    groups: tl.constexpr = values.shape[2]
    wide = tl.broadcast_to(values[:, :, :, None], (first, second, groups, WIDTH // groups))
    return tl.reshape(wide, (first, second, WIDTH))


@triton.jit
def load_scales(
    Scales,
    Zeros,
    rows,
    inside,
    first,
    columns,
    stride_s,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Scales and zeros (SLICES, BLOCK_N, GROUPS) of GROUPS groups from the inputs `first` (SLICES,) on, as they are
    stored; 0 beyond the ends."""
    column = tl.arange(0, GROUPS)[None, :] + tl.zeros_like(first)[:, None]
    if GROUP > 0:
        column += (first // GROUP)[:, None]
    valid = inside[None, :, None] & (column < columns)[:, None, :]
    places = rows.to(tl.int64)[None, :, None] * stride_s + column[:, None, :]
    scales = tl.load(Scales + places, mask=valid, other=0)
    zeros = scales
    if FORMAT == INT4_ZEROS:
        zeros = tl.load(Zeros + places, mask=valid, other=0)
    return scales, zeros


@triton.jit
def _add_step(
    acc,
    words,
    planes,
    scales,
    zeros,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ON_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc (SLICES, BLOCK_N, ROWS) and what a step adds to it, with loaded scales and zeros (SLICES, BLOCK_N, GROUPS).

    A group with zeros that is as long as a step is unpacked as if they were 8. What that misses is the sum of inputs
    times a number: a product with ones has that sum in the layout of the result.
    """
    dtype: tl.constexpr = planes[0].dtype
    PLACES: tl.constexpr = 4 if FORMAT == FP8 else 8
    if ON_SUMS:
        SHIFTED: tl.constexpr = INT4 if FORMAT == INT4_ZEROS else FORMAT
        usual = int4_shifts(tl.full((1, 1, 1), 8.0, tl.float32), INT4, dtype)
        numbers = word_numbers(words, usual, SHIFTED, dtype)
        part = acc if GROUP == 0 and FORMAT != INT4_ZEROS else tl.zeros(acc.shape, tl.float32)
        for place in tl.static_range(PLACES):
            part = tl.dot(numbers[place], planes[place], part, input_precision=PRECISION)
        if FORMAT == INT4_ZEROS:
            ones = tl.full(words.shape, 1.0, dtype)
            inputs = tl.zeros(acc.shape, tl.float32)
            for place in tl.static_range(PLACES):
                inputs = tl.dot(ones, planes[place], inputs, input_precision=PRECISION)
            part = part * sum_factor(SHIFTED, dtype) + inputs * (8.0 - zeros.to(tl.float32))
        if GROUP > 0:
            acc += part * scales.to(tl.float32)
        elif FORMAT == INT4_ZEROS:
            acc += part
        else:
            acc = part
    else:
        WORDS: tl.constexpr = words.shape[2]
        ready = spread(e8m0_scales(scales, dtype) if FORMAT == MXFP4 else scales.to(dtype), WORDS)
        numbers = word_numbers(words, spread(int4_shifts(zeros, FORMAT, dtype), WORDS), FORMAT, dtype)
        for place in tl.static_range(PLACES):
            acc = tl.dot(numbers[place] * ready, planes[place], acc, input_precision=PRECISION)
    return acc


@triton.jit
def half_rows_product(
    X,
    W,
    stride_w,
    rows,
    outputs,
    K,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
):
    """`rows_product` of a weight of 16 bits; K is a multiple of BLOCK_K if EVEN."""
    row_places, has_row = rows
    rows_w, inside = outputs
    ROWS: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    BLOCK_K: tl.constexpr = TILE[2]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    offs = tl.arange(0, BLOCK_K)
    w_ptrs = W + rows_w.to(tl.int64)[:, None] * stride_w + offs[None, :]
    x_ptrs = X + row_places[None, :] + offs[:, None]
    for start in range(0, K, BLOCK_K):
        valid = inside[:, None]
        has_x = has_row[None, :]
        if not EVEN:
            known = start + offs < K
            valid = valid & known[None, :]
            has_x = has_x & known[:, None]
        x = tl.load(x_ptrs + start, mask=has_x, other=0.0)
        w = tl.load(w_ptrs + start, mask=valid, other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def rows_product(
    X,
    weight,
    rows,
    outputs,
    K,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    DIVISOR: tl.constexpr,
):
    """Products (BLOCK_N, ROWS) in fp32 of outputs of a weight with rows of X, scaled.

    The warps of a program share the inputs: each multiplies a slice of every turn's, and at the end their sums are
    added, always in the same order. A warp alone computes slowly, since what it does is one chain.

    Args:
        X: activations.
        weight: (W, Scales, Zeros, stride_w, stride_s). W has 16-bit numbers, or words (int32) of four or eight numbers;
            outputs are `stride_w` of them apart. Scales and Zeros are as in the formats, outputs or blocks of outputs
            `stride_s` apart; None where there are none.
        rows: (row_places, has_row), each (ROWS,): the places of their first inputs in X (int64), and which there are.
        outputs: (rows_w, inside), each (BLOCK_N,): rows of W, in any order, and which there are.
        LAYOUT: (FORMAT, GROUP, BLOCK_ROWS): a format of `unpack`; inputs of a scale, a power of two of at least 8, or 0
            if one is for all inputs; and outputs of a scale.
        TILE: (ROWS, BLOCK_N, BLOCK_K, SLICES). BLOCK_K inputs are a turn of the loop: of each slice at least 128 for
            four-bit numbers, 64 for FP8, and no more than GROUP if that is as large. SLICES are as many as there are
            warps; not used for 16 bits.
        DIVISOR: a power of two that K is a multiple of, as `divisor` finds it. Of it depends how wide loads are.
    """
    W, Scales, Zeros, stride_w, stride_s = weight
    row_places, has_row = rows
    rows_w, inside = outputs
    # Constants are taken one by one: what several names are assigned at once are tensors.
    FORMAT: tl.constexpr = LAYOUT[0]
    GROUP: tl.constexpr = LAYOUT[1]
    BLOCK_ROWS: tl.constexpr = LAYOUT[2]
    ROWS: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    BLOCK_K: tl.constexpr = TILE[2]
    SLICES: tl.constexpr = TILE[3]
    EVEN: tl.constexpr = DIVISOR % BLOCK_K == 0
    if FORMAT == HALF:
        total = half_rows_product(X, W, stride_w, rows, outputs, K, TILE, PRECISION, EVEN)
    else:
        PER_WORD: tl.constexpr = 4 if FORMAT == FP8 else 8
        STEP: tl.constexpr = BLOCK_K // SLICES
        WORDS: tl.constexpr = STEP // PER_WORD
        # Scales of enough inputs multiply the sums of their products, others the weights.
        ON_SUMS: tl.constexpr = FORMAT != MXFP4 and (GROUP == 0 or GROUP % STEP == 0)
        GROUPS: tl.constexpr = 1 if ON_SUMS else STEP // GROUP
        acc = tl.zeros((SLICES, BLOCK_N, ROWS), tl.float32)
        columns = 1 if GROUP == 0 else tl.cdiv(K, GROUP)
        slices = tl.arange(0, SLICES) * STEP
        offs = slices[:, None] + tl.arange(0, STEP)[None, :]
        places = (slices // PER_WORD)[:, None] + tl.arange(0, WORDS)[None, :]
        x_ptrs = X + row_places[None, :, None] + offs[:, None, :]
        w_ptrs = W + rows_w.to(tl.int64)[None, :, None] * stride_w + places[:, None, :]
        s_rows = rows_w // BLOCK_ROWS
        # Scales are loaded a turn before they are used: loads of so few bytes are not part of the pipeline.
        scales, zeros = load_scales(Scales, Zeros, s_rows, inside, slices, columns, stride_s, FORMAT, GROUP, GROUPS)
        for start in range(0, K, BLOCK_K):
            valid = inside[None, :, None]
            has_x = has_row[None, :, None]
            if not EVEN:
                has_x = has_x & (start + offs < tl.multiple_of(K, DIVISOR))[:, None, :]
                end = tl.multiple_of(K // PER_WORD, max(1, DIVISOR // PER_WORD))
                valid = valid & (start // PER_WORD + places < end)[:, None, :]
            x = tl.load(x_ptrs + start, mask=has_x, other=0.0)
            words = tl.load(w_ptrs + start // PER_WORD, mask=valid, other=0)
            planes = _planes(x, FORMAT, SLICES, ROWS, STEP)
            now, now_zeros = scales, zeros
            if GROUP > 0:
                scales, zeros = load_scales(
                    Scales, Zeros, s_rows, inside, start + BLOCK_K + slices, columns, stride_s, FORMAT, GROUP, GROUPS
                )
            acc = _add_step(acc, words, planes, now, now_zeros, FORMAT, GROUP, ON_SUMS, PRECISION)
        if GROUP == 0:
            acc *= scales.to(tl.float32)
        total = tl.sum(acc, 0) * sum_factor(FORMAT, X.dtype.element_ty)
    return total
