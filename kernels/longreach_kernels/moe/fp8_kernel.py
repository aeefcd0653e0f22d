"""Products of experts with many rows each, both in FP8 with scales."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.moe.many_kernel import finish, place_of


@triton.jit
def _weight_tile(
    W,
    expert,
    first,
    part,
    k,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TMA: tl.constexpr,
):
    """The outputs from `first` on, of the gates (part 0) or of what they gate (part 1): (BLOCK_N, BLOCK_K)."""
    if TMA:
        if INTERLEAVED:
            tile = tl.reshape(W.load([expert, first, part, k]), (BLOCK_N, BLOCK_K))
        else:
            tile = tl.reshape(W.load([expert, part, first, k]), (BLOCK_N, BLOCK_K))
    else:
        rows = first + tl.arange(0, BLOCK_N)
        columns = k + tl.arange(0, BLOCK_K)
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        rows = rows * 2 + part if INTERLEAVED else rows + part * N
        places = expert.to(tl.int64) * STRIDES[0] + rows.to(tl.int64)[:, None] * STRIDES[1] + columns[None, :]
        tile = tl.load(W + places, mask=inside, other=0.0)
    return tile


@triton.jit
def _weight_scales(
    Scales,
    expert,
    first,
    part,
    group,
    N: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The scales (BLOCK_N,) of the same outputs."""
    rows = first + tl.arange(0, BLOCK_N)
    inside = rows < N
    rows = rows * 2 + part if INTERLEAVED else rows + part * N
    places = expert.to(tl.int64) * STRIDES[2] + (rows // BLOCK_ROWS).to(tl.int64) * STRIDES[3] + group
    return tl.load(Scales + places, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_inputs", "most_tiles"])
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
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDES: tl.constexpr,
    BY_GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
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
        tile_m, tile_n = place_of(tile, num_tiles, TILES_N, GROUP)
        expert = tl.load(Tiles + tile_m)
        first_row = tl.load(Tiles + most_tiles + tile_m)
        end = tl.load(Tiles + 2 * most_tiles + tile_m)
        first = tile_n * BLOCK_N
        rows = first_row + tl.arange(0, BLOCK_M)
        has_row = rows < end
        inputs = rows
        if Order is not None:
            inputs = tl.load(Order + rows, mask=has_row, other=0) // TOP_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range((K + BLOCK_K - 1) // BLOCK_K):
            k = step * BLOCK_K
            if X_BY_ROW:
                if TMA:
                    x = X.load([first_row, k])
                else:
                    columns = k + tl.arange(0, BLOCK_K)
                    known = has_row[:, None] & (columns < K)[None, :]
                    x = tl.load(X + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=known, other=0.0)
            else:
                columns = k + tl.arange(0, BLOCK_K)
                known = has_row[:, None] & (columns < K)[None, :]
                x = tl.load(X + inputs.to(tl.int64)[:, None] * K + columns[None, :], mask=known, other=0.0)
            w = _weight_tile(W, expert, first, 0, k, N, K, STRIDES, BLOCK_N, BLOCK_K, INTERLEAVED, TMA)
            if BY_GROUP:
                of_rows = tl.load(XScales + step * num_inputs + inputs, mask=has_row, other=0.0)
                scales = _weight_scales(Scales, expert, first, 0, step, N, STRIDES, BLOCK_N, BLOCK_ROWS, INTERLEAVED)
                acc += tl.dot(x, tl.trans(w)) * of_rows[:, None] * scales[None, :]
            else:
                acc = tl.dot(x, tl.trans(w), acc)
            if GATED:
                w_up = _weight_tile(W, expert, first, 1, k, N, K, STRIDES, BLOCK_N, BLOCK_K, INTERLEAVED, TMA)
                if BY_GROUP:
                    scales = _weight_scales(
                        Scales, expert, first, 1, step, N, STRIDES, BLOCK_N, BLOCK_ROWS, INTERLEAVED
                    )
                    acc_up += tl.dot(x, tl.trans(w_up)) * of_rows[:, None] * scales[None, :]
                else:
                    acc_up = tl.dot(x, tl.trans(w_up), acc_up)
        if not BY_GROUP:
            of_rows = tl.load(XScales + inputs, mask=has_row, other=0.0)
            scales = _weight_scales(Scales, expert, first, 0, 0, N, STRIDES, BLOCK_N, BLOCK_ROWS, INTERLEAVED)
            acc *= of_rows[:, None] * scales[None, :]
            if GATED:
                scales = _weight_scales(Scales, expert, first, 1, 0, N, STRIDES, BLOCK_N, BLOCK_ROWS, INTERLEAVED)
                acc_up *= of_rows[:, None] * scales[None, :]
        finish(acc, acc_up, Bias, Out, expert, first, rows, has_row, N, INTERLEAVED, ACTIVATION, ALPHA, LIMIT)
