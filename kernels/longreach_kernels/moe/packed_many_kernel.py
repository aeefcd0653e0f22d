"""Products of packed experts with many rows each, in tiles of rows of one expert, without a copy of the weights.

The weight is the left operand, and the rows are columns of the result: a word of eight numbers is unpacked in the
registers of the thread that multiplies them, in the layout that the tensor cores take.

A word has numbers of eight neighbouring inputs, and a step of the tensor cores takes 16 inputs, of which a thread has
four. So inputs are taken in the order of planes: of each 128, first every eighth from the first on, then every eighth
from the second on, and so forth. Rows lie in that order in memory, filled up with zeros.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.linear.unpack import (
    INT4_ZEROS,
    MXFP4,
    e8m0_scales,
    int4_shifts,
    sum_factor,
    word_numbers,
)
from longreach_kernels.moe.activation_kernel import activate
from longreach_kernels.moe.many_kernel import place_of

STEP = 128  # inputs that are in the order of planes together
_STEP: tl.constexpr = tl.constexpr(STEP)
_WORDS: tl.constexpr = tl.constexpr(STEP // 8)


@triton.jit
def plane_place(offs):
    """The input, or the output of a product before, that lies at a place of the order of planes."""
    return offs // _STEP * _STEP + offs % _WORDS * 8 + offs % _STEP // _WORDS


@triton.jit
def _scales(
    weight,
    rows,
    step,
    K: tl.constexpr,
    PITCH: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Scales and zeros (BLOCK_N, parts) of a step's inputs, as they are stored; beyond the ends those of the last.

    A part has 32 inputs or fewer, though a group may have more: one load of a few numbers for each thread or more is
    what the compiler then brings into the layout of the product. Of a smaller load it would move what it unpacks.
    """
    _, Scales, Zeros = weight
    SIZE: tl.constexpr = K if GROUP == 0 else GROUP
    COLUMNS: tl.constexpr = (K + SIZE - 1) // SIZE
    PART: tl.constexpr = min(SIZE, 32)
    column = (tl.arange(0, _STEP // PART) * PART + step * _STEP) // SIZE
    column = tl.minimum(column, COLUMNS - 1)
    places = (rows // BLOCK_ROWS).to(tl.int64)[:, None] * PITCH + column[None, :]
    scales = tl.load(Scales + places)
    zeros = scales
    if FORMAT == INT4_ZEROS:
        zeros = tl.load(Zeros + places)
    return scales, zeros


@triton.jit
def _spread(values):
    """Values (BLOCK_N, parts) for each word of a step (BLOCK_N, words)."""
    BLOCK_N: tl.constexpr = values.shape[0]
    PARTS: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[:, :, None], (BLOCK_N, PARTS, _WORDS // PARTS))
    return tl.reshape(wide, (BLOCK_N, _WORDS))


@triton.jit
def _unpacked(words, scales, zeros, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Words (BLOCK_N, words) with stored scales and zeros (BLOCK_N, parts) as weights (BLOCK_N, 128), in the order of
    planes; they lack `sum_factor`."""
    BLOCK_N: tl.constexpr = words.shape[0]
    if FORMAT == MXFP4:
        ready = _spread(e8m0_scales(scales, dtype))
    else:
        ready = _spread(scales.to(dtype))
    n = word_numbers(words, _spread(int4_shifts(zeros, FORMAT, dtype)), FORMAT, dtype)
    even = tl.join(tl.join(n[0] * ready, n[4] * ready), tl.join(n[2] * ready, n[6] * ready))
    odd = tl.join(tl.join(n[1] * ready, n[5] * ready), tl.join(n[3] * ready, n[7] * ready))
    # The dims that come last are 4, 2 and 1 times a bit of the place.
    tile = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1))
    return tl.reshape(tile, (BLOCK_N, _STEP))


@triton.jit
def _store(acc, Out, columns, inside, rows, has_row, WIDTH: tl.constexpr):
    """Store sums (BLOCK_N, rows) at columns of rows, rounded once."""
    values = tl.trans(acc.to(Out.dtype.element_ty))
    out = Out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(out, values, mask=has_row[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["most_tiles", "group"])
def packed_many_kernel(
    X,
    W,
    Scales,
    Zeros,
    Bias,
    Out,
    Tiles,
    NumTiles,
    most_tiles,
    group,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PLANES: tl.constexpr,
    STRIDES: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Any number of programs: Out (P, WIDTH), by row, of X (P, K), by row, and W (E, N, K), or W (E, 2 N, K) where an
    activation follows.

    Rows of X are in the order of planes, and as long as whole steps; X is a tensor descriptor if TMA. Out is in that
    order, too, if PLANES. A tile has BLOCK_N outputs with an activation, else twice as many.

    STRIDES are those of W's experts and outputs, in words, and of the scales' and zeros' experts and outputs, or blocks
    of these. LAYOUT is (FORMAT, GROUP, BLOCK_ROWS) as of `packed_product`.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    FORMAT: tl.constexpr = LAYOUT[0]
    GROUP: tl.constexpr = LAYOUT[1]
    BLOCK_ROWS: tl.constexpr = LAYOUT[2]
    PITCH: tl.constexpr = STRIDES[3]
    LENGTH: tl.constexpr = (K + _STEP - 1) // _STEP * _STEP
    OUTPUTS: tl.constexpr = BLOCK_N if GATED else 2 * BLOCK_N
    TILES_N: tl.constexpr = (WIDTH + OUTPUTS - 1) // OUTPUTS
    dtype: tl.constexpr = Out.dtype.element_ty
    num_tiles = tl.load(NumTiles)
    for tile in tl.range(tl.program_id(0), num_tiles * TILES_N, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = place_of(tile, num_tiles, TILES_N, group)
        expert = tl.load(Tiles + tile_m)
        first_row = tl.load(Tiles + most_tiles + tile_m)
        end = tl.load(Tiles + 2 * most_tiles + tile_m)
        columns = tile_n * OUTPUTS + tl.arange(0, BLOCK_N)
        outputs = plane_place(columns) if PLANES else columns
        # Gates and what they gate, or outputs and more outputs.
        more = outputs if GATED else outputs + BLOCK_N
        inside = outputs < N
        more_inside = more < N
        outputs = tl.where(inside, outputs, 0)
        more = tl.where(more_inside, more, 0)
        if GATED:
            outputs_w = 2 * outputs if INTERLEAVED else outputs
            more_w = 2 * more + 1 if INTERLEAVED else more + N
        else:
            outputs_w = outputs
            more_w = more
        base = expert.to(tl.int64)
        s_base = base * STRIDES[2]
        words_of = W + base * STRIDES[0]
        weight = (words_of, Scales + s_base, Scales if Zeros is None else Zeros + s_base)
        place = tl.arange(0, _WORDS)
        w_ptrs = words_of + outputs_w.to(tl.int64)[:, None] * STRIDES[1] + place[None, :]
        m_ptrs = words_of + more_w.to(tl.int64)[:, None] * STRIDES[1] + place[None, :]
        scales, zeros = _scales(weight, outputs_w, 0, K, PITCH, FORMAT, GROUP, BLOCK_ROWS)
        m_scales, m_zeros = _scales(weight, more_w, 0, K, PITCH, FORMAT, GROUP, BLOCK_ROWS)
        rows = first_row + tl.arange(0, BLOCK_M)
        has_row = rows < end
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        m_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in range(LENGTH // _STEP):
            if TMA:
                x = X.load([first_row, step * _STEP])
            else:
                offs = tl.arange(0, _STEP) + step * _STEP
                x_ptrs = X + rows.to(tl.int64)[:, None] * LENGTH + offs[None, :]
                x = tl.load(x_ptrs, mask=has_row[:, None], other=0.0)
            known = (place + step * _WORDS < K // 8)[None, :]
            words = tl.load(w_ptrs + step * _WORDS, mask=known, other=0)
            m_words = tl.load(m_ptrs + step * _WORDS, mask=known, other=0)
            # Scales are loaded a step before they are used.
            now, now_zeros, m_now, m_now_zeros = scales, zeros, m_scales, m_zeros
            scales, zeros = _scales(weight, outputs_w, step + 1, K, PITCH, FORMAT, GROUP, BLOCK_ROWS)
            m_scales, m_zeros = _scales(weight, more_w, step + 1, K, PITCH, FORMAT, GROUP, BLOCK_ROWS)
            of_rows = tl.trans(x)
            numbers = _unpacked(words, now, now_zeros, FORMAT, dtype)
            acc = tl.dot(numbers, of_rows, acc, input_precision=PRECISION)
            numbers = _unpacked(m_words, m_now, m_now_zeros, FORMAT, dtype)
            m_acc = tl.dot(numbers, of_rows, m_acc, input_precision=PRECISION)
        acc *= sum_factor(FORMAT, dtype)
        m_acc *= sum_factor(FORMAT, dtype)
        if Bias is not None:
            of_expert = Bias + base * (2 * N if GATED else N)
            acc += tl.load(of_expert + outputs_w, mask=inside, other=0.0).to(tl.float32)[:, None]
            m_acc += tl.load(of_expert + more_w, mask=more_inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            result = activate(acc, m_acc, ACTIVATION, ALPHA, LIMIT)
            result = tl.where(inside[:, None], result, 0.0)
            _store(result, Out, columns, columns < WIDTH, rows, has_row, WIDTH)
        else:
            _store(acc, Out, columns, columns < WIDTH, rows, has_row, WIDTH)
            _store(m_acc, Out, columns + BLOCK_N, columns + BLOCK_N < WIDTH, rows, has_row, WIDTH)
