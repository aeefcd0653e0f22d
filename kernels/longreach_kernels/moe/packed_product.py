"""Products of a packed weight with few rows, for the loops of kernels of experts.

The weight is the left operand, and the rows are columns of the result: a weight is loaded, unpacked and multiplied
in the registers of one thread, in the layout that the tensor cores take. Unpacked weights are never written to shared
memory: each plane of `linear.unpack` is multiplied with every fourth or eighth input.

`linear.tiles.rows_product` has each warp multiply inputs of its own. That suits one layer. With experts there are more
programs, and this form is quicker: gpt-oss's gates at 8 tokens take 110 us, against 116.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.linear.unpack import (
    FP8,
    INT4_ZEROS,
    MXFP4,
    e8m0_scales,
    int4_shifts,
    sum_factor,
    word_numbers,
)


@triton.jit
def _planes_of_4(x, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Of rows (ROWS, STEP) four tiles (STEP / 4, ROWS): every fourth input, from the first, the second, .."""
    even, odd = tl.split(tl.reshape(x, (ROWS, STEP // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return tl.trans(x0), tl.trans(x1), tl.trans(x2), tl.trans(x3)


@triton.jit
def _planes_of_8(x, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Of rows (ROWS, STEP) eight tiles (STEP / 8, ROWS): every eighth input, from the first, the second, .."""
    even, odd = tl.split(tl.reshape(x, (ROWS, STEP // 8, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return (
        tl.trans(x0),
        tl.trans(x1),
        tl.trans(x2),
        tl.trans(x3),
        tl.trans(x4),
        tl.trans(x5),
        tl.trans(x6),
        tl.trans(x7),
    )


@triton.jit
def _planes(x, FORMAT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    if FORMAT == FP8:
        planes = _planes_of_4(x, ROWS, STEP)
    else:
        planes = _planes_of_8(x, ROWS, STEP)
    return planes


@triton.jit
def _packed_product(
    acc,
    words,
    planes,
    scales,
    shifts,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    dtype: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc (BLOCK_N, ROWS) and what words (BLOCK_N, W) add to it; scales, used if SCALED, and shifts fit the words."""
    numbers = word_numbers(words, shifts, FORMAT, dtype)
    for place in tl.static_range(4 if FORMAT == FP8 else 8):
        number = numbers[place]
        if SCALED:
            number *= scales
        acc = tl.dot(number, planes[place], acc, input_precision=PRECISION)
    return acc


@triton.jit
def _load_scales(
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
    """Scales and zeros (BLOCK_N, GROUPS) of the inputs from `first` on, as they are stored; 0 beyond the ends."""
    column = tl.arange(0, GROUPS)
    if GROUP > 0:
        column += first // GROUP
    valid = inside[:, None] & (column < columns)[None, :]
    places = rows.to(tl.int64)[:, None] * stride_s + column[None, :]
    scales = tl.load(Scales + places, mask=valid, other=0)
    zeros = scales
    if FORMAT == INT4_ZEROS:
        zeros = tl.load(Zeros + places, mask=valid, other=0)
    return scales, zeros


@triton.jit
def _spread(values, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Values (BLOCK_N, GROUPS) for each of WIDTH words or inputs (BLOCK_N, WIDTH)."""
    wide = tl.broadcast_to(values[:, :, None], (BLOCK_N, GROUPS, WIDTH // GROUPS))
    return tl.reshape(wide, (BLOCK_N, WIDTH))


@triton.jit
def _add_step(
    acc,
    words,
    planes,
    scales,
    zeros,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ON_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc (BLOCK_N, ROWS) and what a step adds to it, with loaded scales and zeros (BLOCK_N, GROUPS)."""
    dtype: tl.constexpr = planes[0].dtype
    BLOCK_N: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if ON_SUMS:
        shifts = int4_shifts(zeros, FORMAT, dtype)
        if GROUP == 0:
            acc = _packed_product(acc, words, planes, shifts, shifts, FORMAT, False, dtype, PRECISION)
        else:
            part = tl.zeros(acc.shape, tl.float32)
            part = _packed_product(part, words, planes, shifts, shifts, FORMAT, False, dtype, PRECISION)
            acc += part * scales.to(tl.float32)
    else:
        if FORMAT == MXFP4:
            ready = e8m0_scales(scales, dtype)
        else:
            ready = scales.to(dtype)
        ready = _spread(ready, BLOCK_N, WORDS, GROUPS)
        shifts = _spread(int4_shifts(zeros, FORMAT, dtype), BLOCK_N, WORDS, GROUPS)
        acc = _packed_product(acc, words, planes, ready, shifts, FORMAT, True, dtype, PRECISION)
    return acc


@triton.jit
def packed_product(
    X,
    weight,
    rows,
    outputs,
    UP: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products (BLOCK_N, ROWS) in fp32 of outputs of a weight with rows of X, scaled, and if GATED those of the outputs
    UP further on.

    Args:
        X: activations.
        weight: (W, Scales, Zeros) of an expert: words (int32) of four or eight numbers, and the rest as in the formats.
        rows: (row_places, has_row), each (ROWS,): the places of their first inputs in X (int64), and which there are.
        outputs: (rows_w, inside), each (BLOCK_N,): rows of W, and which there are.
        STRIDES: as of `few_kernel`.
        LAYOUT: (FORMAT, GROUP, BLOCK_ROWS): one of the formats above; inputs of a scale, a power of two of at least 8,
            or 0 if one is for all inputs; and outputs of a scale.
        TILE: (ROWS, BLOCK_N, BLOCK_K). BLOCK_K inputs are a turn of the loop: 128 or more for four-bit numbers, 64 or
            more for FP8.
    """
    W, Scales, Zeros = weight
    row_places, has_row = rows
    rows_w, inside = outputs
    FORMAT: tl.constexpr = LAYOUT[0]
    GROUP: tl.constexpr = LAYOUT[1]
    BLOCK_ROWS: tl.constexpr = LAYOUT[2]
    ROWS: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    BLOCK_K: tl.constexpr = TILE[2]
    PER_WORD: tl.constexpr = 4 if FORMAT == FP8 else 8
    # Scales of enough inputs multiply the sums of their products, others the weights.
    ON_SUMS: tl.constexpr = FORMAT != MXFP4 and (GROUP == 0 or GROUP >= 16 * PER_WORD)
    STEP: tl.constexpr = GROUP if ON_SUMS and GROUP > 0 and GROUP < BLOCK_K else BLOCK_K
    GROUPS: tl.constexpr = 1 if ON_SUMS else STEP // GROUP
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    acc_up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    columns = 1 if GROUP == 0 else tl.cdiv(K, GROUP)
    offs = tl.arange(0, STEP)
    place = tl.arange(0, STEP // PER_WORD)
    x_ptrs = X + row_places[:, None] + offs[None, :]
    w_ptrs = W + rows_w.to(tl.int64)[:, None] * STRIDES[1] + place[None, :]
    u_ptrs = W + (rows_w + UP).to(tl.int64)[:, None] * STRIDES[1] + place[None, :]
    s_rows = rows_w // BLOCK_ROWS
    us_rows = (rows_w + UP) // BLOCK_ROWS
    # Scales are loaded a step before they are used: loads of so few bytes are not part of the pipeline.
    scales, zeros = _load_scales(Scales, Zeros, s_rows, inside, 0, columns, STRIDES[3], FORMAT, GROUP, GROUPS)
    up_scales, up_zeros = scales, zeros
    if GATED:
        up_scales, up_zeros = _load_scales(
            Scales, Zeros, us_rows, inside, 0, columns, STRIDES[3], FORMAT, GROUP, GROUPS
        )
    for start in range(0, K, BLOCK_K):
        for step in tl.static_range(BLOCK_K // STEP):
            first = start + step * STEP
            x = tl.load(x_ptrs + first, mask=has_row[:, None] & (first + offs < K)[None, :], other=0.0)
            valid = inside[:, None] & (first // PER_WORD + place < K // PER_WORD)[None, :]
            words = tl.load(w_ptrs + first // PER_WORD, mask=valid, other=0)
            planes = _planes(x, FORMAT, ROWS, STEP)
            now, now_zeros = scales, zeros
            if GROUP > 0:
                scales, zeros = _load_scales(
                    Scales, Zeros, s_rows, inside, first + STEP, columns, STRIDES[3], FORMAT, GROUP, GROUPS
                )
            acc = _add_step(acc, words, planes, now, now_zeros, FORMAT, GROUP, GROUPS, ON_SUMS, PRECISION)
            if GATED:
                up_words = tl.load(u_ptrs + first // PER_WORD, mask=valid, other=0)
                now, now_zeros = up_scales, up_zeros
                if GROUP > 0:
                    up_scales, up_zeros = _load_scales(
                        Scales, Zeros, us_rows, inside, first + STEP, columns, STRIDES[3], FORMAT, GROUP, GROUPS
                    )
                acc_up = _add_step(acc_up, up_words, planes, now, now_zeros, FORMAT, GROUP, GROUPS, ON_SUMS, PRECISION)
    factor = sum_factor(FORMAT, X.dtype.element_ty)
    acc *= factor
    acc_up *= factor
    if GROUP == 0:
        acc *= scales.to(tl.float32)
        acc_up *= up_scales.to(tl.float32)
    return acc, acc_up
