"""Products of experts with many rows each, both in FP8 with scales."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.moe.many_kernel import finish, gate_and_up, place_of, weight_tile


@triton.jit
def _scales(
    Scales,
    expert,
    first,
    group,
    N: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The scales of the columns that `weight_tile` gives: (BLOCK_N,), or (2 BLOCK_N,) of gates and what they gate."""
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    base = Scales + expert.to(tl.int64) * STRIDES[2] + group
    columns = tl.arange(0, WIDTH)
    if not INTERLEAVED and BLOCK_ROWS % BLOCK_N == 0 and N % BLOCK_ROWS == 0:  # one for all, or one for each half
        scales = tl.zeros((WIDTH,), tl.float32) + tl.load(base + (first // BLOCK_ROWS) * STRIDES[3])
        if GATED:
            scales = tl.where(columns < BLOCK_N, scales, tl.load(base + ((first + N) // BLOCK_ROWS) * STRIDES[3]))
    else:
        if INTERLEAVED:
            rows = 2 * first + columns
            inside = rows < 2 * N
        else:
            rows = first + columns % BLOCK_N
            inside = rows < N
            rows += columns // BLOCK_N * N
        scales = tl.load(base + (rows // BLOCK_ROWS).to(tl.int64) * STRIDES[3], mask=inside, other=0.0)
    return scales


@triton.jit(do_not_specialize=["num_inputs", "most_tiles", "group"])
def fp8_kernel(
    X,
    XScales,
    W,
    Scales,
    Bias,
    Out,
    Order,
    Tiles,
    NumTiles,
    num_inputs,
    most_tiles,
    group,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDES: tl.constexpr,
    BY_GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_BY_ROW: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Any number of programs: Out (P, N), by row, of X (T, K), or (P, K) if X_BY_ROW, with XScales (groups, T), and W
    (E, N, K), or W (E, 2 N, K) where an activation follows. Without an Order, XScales are by row as X.

    Scales are for BLOCK_K inputs if BY_GROUP, else for all. W is a tensor descriptor if TMA, and then so is X by row.
    STRIDES are those of W's experts and outputs, and of the scales' experts and outputs, or blocks of these.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    num_tiles = tl.load(NumTiles)
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), num_tiles * TILES_N, tl.num_programs(0), flatten=True):
        tile_m, tile_n = place_of(tile, num_tiles, TILES_N, group)
        expert = tl.load(Tiles + tile_m)
        first_row = tl.load(Tiles + most_tiles + tile_m)
        end = tl.load(Tiles + 2 * most_tiles + tile_m)
        first = tile_n * BLOCK_N
        rows = first_row + tl.arange(0, BLOCK_M)
        has_row = rows < end
        inputs = rows
        if Order is not None:
            inputs = tl.load(Order + rows, mask=has_row, other=0) // TOP_K
        acc = tl.zeros((BLOCK_M, (2 if GATED else 1) * BLOCK_N), tl.float32)
        for step in range((K + BLOCK_K - 1) // BLOCK_K):
            k = step * BLOCK_K
            if X_BY_ROW and TMA:
                x = X.load([first_row, k])
            else:
                columns = k + tl.arange(0, BLOCK_K)
                known = has_row[:, None]
                if K % BLOCK_K != 0:
                    known = known & (columns < K)[None, :]
                places = rows if X_BY_ROW else inputs
                x = tl.load(X + places.to(tl.int64)[:, None] * K + columns[None, :], mask=known, other=0.0)
            w = weight_tile(W, (expert, first, k), N, K, STRIDES, BLOCK_N, BLOCK_K, GATED, INTERLEAVED, TMA)
            if BY_GROUP:
                of_rows = tl.load(XScales + step * num_inputs + inputs, mask=has_row, other=0.0)
                scales = _scales(Scales, expert, first, step, N, STRIDES, BLOCK_N, BLOCK_ROWS, GATED, INTERLEAVED)
                if GATED or BLOCK_ROWS % BLOCK_N != 0:
                    acc += tl.dot(x, tl.trans(w)) * (of_rows[:, None] * scales[None, :])
                else:
                    block = tl.max(scales, 0)  # all are one
                    acc += tl.dot(x, tl.trans(w)) * (of_rows * block)[:, None]
            else:
                acc = tl.dot(x, tl.trans(w), acc)
        if not BY_GROUP:
            of_rows = tl.load(XScales + inputs, mask=has_row, other=0.0)
            scales = _scales(Scales, expert, first, 0, N, STRIDES, BLOCK_N, BLOCK_ROWS, GATED, INTERLEAVED)
            acc *= of_rows[:, None] * scales[None, :]
        if GATED:
            gate, up = gate_and_up(acc, INTERLEAVED)
            finish(gate, up, Bias, Out, expert, first, (rows, has_row), N, INTERLEAVED, ACTIVATION, ALPHA, LIMIT)
        elif BLOCK_N == 256:  # in halves, as in `many_kernel`
            low, high = gate_and_up(acc, False)
            half = first + BLOCK_N // 2
            finish(low, low, Bias, Out, expert, first, (rows, has_row), N, False, None, ALPHA, LIMIT)
            finish(high, high, Bias, Out, expert, half, (rows, has_row), N, False, None, ALPHA, LIMIT)
        else:
            finish(acc, acc, Bias, Out, expert, first, (rows, has_row), N, False, None, ALPHA, LIMIT)
