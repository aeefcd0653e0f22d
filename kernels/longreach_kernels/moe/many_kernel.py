"""Products of experts with many rows each, in tiles of rows of one expert (grouped products)."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.moe.activation_kernel import activate


@triton.jit
def place_of(tile, tiles_m, tiles_n, group):
    """The row tile and the column tile of a number: `group` row tiles go through all columns together."""
    in_group = group * tiles_n
    first = tile // in_group * group
    size = tl.minimum(tiles_m - first, group)
    within = tile % in_group
    return first + within % size, within // size


@triton.jit
def weight_tile(
    W,
    place,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TMA: tl.constexpr,
):
    """A tile of an expert's weights (BLOCK_N, BLOCK_K); of gates and what they gate (2 BLOCK_N, BLOCK_K), alternating
    or one after the other, as they lie. Beyond its ends zeros, or what nobody stores. Its place is the expert, the
    first output and the first input. The first two of STRIDES are those of experts and outputs."""
    expert, first, k = place
    if not GATED:
        if TMA:
            tile = tl.reshape(W.load([expert, first, k]), (BLOCK_N, BLOCK_K))
        else:
            rows = first + tl.arange(0, BLOCK_N)
            columns = k + tl.arange(0, BLOCK_K)
            inside = (rows < N)[:, None] & (columns < K)[None, :]
            base = W + expert.to(tl.int64) * STRIDES[0]
            tile = tl.load(base + rows.to(tl.int64)[:, None] * STRIDES[1] + columns[None, :], mask=inside, other=0.0)
    elif TMA:
        if INTERLEAVED:
            tile = tl.reshape(W.load([expert, 2 * first, k]), (2 * BLOCK_N, BLOCK_K))
        else:
            tile = tl.reshape(W.load([expert, 0, first, k]), (2 * BLOCK_N, BLOCK_K))
    else:
        offs = tl.arange(0, 2 * BLOCK_N)
        columns = k + tl.arange(0, BLOCK_K)
        if INTERLEAVED:
            rows = 2 * first + offs
            there = rows < 2 * N
        else:
            rows = first + offs % BLOCK_N
            there = rows < N
            rows += offs // BLOCK_N * N
        inside = there[:, None] & (columns < K)[None, :]
        base = W + expert.to(tl.int64) * STRIDES[0]
        tile = tl.load(base + rows.to(tl.int64)[:, None] * STRIDES[1] + columns[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def gate_and_up(acc, INTERLEAVED: tl.constexpr):
    """Gates and what they gate, of columns that alternate or lie in halves."""
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1] // 2
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(acc, (M, N, 2)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (M, 2, N)), (0, 2, 1)))
    return gate, up


@triton.jit
def finish(
    gate,
    up,
    Bias,
    Out,
    expert,
    first,
    rows,
    N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Store sums (rows, columns) with what belongs to the product, rounded once. The rows are two vectors: their
    numbers, and which there are."""
    places, has_row = rows
    columns = first + tl.arange(0, gate.shape[1])
    inside = columns < N
    if ACTIVATION is None:
        if Bias is not None:
            gate += tl.load(Bias + expert * N + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    else:
        if Bias is not None:
            base = Bias + expert * (2 * N) + (2 * columns if INTERLEAVED else columns)
            gate += tl.load(base, mask=inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(base + (1 if INTERLEAVED else N), mask=inside, other=0.0).to(tl.float32)[None, :]
        gate = activate(gate, up, ACTIVATION, ALPHA, LIMIT)
    out = Out + places.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out, gate.to(Out.dtype.element_ty), mask=has_row[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["most_tiles", "group"])
def many_kernel(
    X,
    W,
    Bias,
    Out,
    Order,
    Tiles,
    NumTiles,
    most_tiles,
    group,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Any number of programs: Out (P, N), by row, of X (T, K), or (P, K) by row where there is no Order, and W (E, N,
    K), or W (E, 2 N, K) where an activation follows. W is a tensor descriptor if TMA, and then so is X by row."""
    GATED: tl.constexpr = ACTIVATION is not None
    num_tiles = tl.load(NumTiles)
    OF_EXPERT: tl.constexpr = (2 if GATED else 1) * N * K
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
            if TMA and Order is None:
                x = X.load([first_row, k])
            else:
                columns = k + tl.arange(0, BLOCK_K)
                known = has_row[:, None]
                if K % BLOCK_K != 0:
                    known = known & (columns < K)[None, :]
                x = tl.load(X + inputs.to(tl.int64)[:, None] * K + columns[None, :], mask=known, other=0.0)
            w = weight_tile(W, (expert, first, k), N, K, (OF_EXPERT, K), BLOCK_N, BLOCK_K, GATED, INTERLEAVED, TMA)
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        if GATED:
            gate, up = gate_and_up(acc, INTERLEAVED)
            finish(gate, up, Bias, Out, expert, first, (rows, has_row), N, INTERLEAVED, ACTIVATION, ALPHA, LIMIT)
        elif BLOCK_N == 256:  # in halves: what a whole tile takes on its way out would take a stage from the pipeline
            low, high = gate_and_up(acc, False)
            half = first + BLOCK_N // 2
            finish(low, low, Bias, Out, expert, first, (rows, has_row), N, False, None, ALPHA, LIMIT)
            finish(high, high, Bias, Out, expert, half, (rows, has_row), N, False, None, ALPHA, LIMIT)
        else:
            finish(acc, acc, Bias, Out, expert, first, (rows, has_row), N, False, None, ALPHA, LIMIT)
