"""Products of experts with many rows each, both in FP8 with scales of 128 inputs.

Sums of 128 inputs are multiplied with their scales and added up in fp32. Both sums take registers. So a tile is two
tiles side by side, which share their rows: while one is added up, the other is multiplied, and there is one sum of 128
inputs at a time.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.moe.many_kernel import finish, gate_and_up, place_of


@triton.jit
def _weights(
    W,
    base,
    place,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """A tile (BLOCK_N, BLOCK_K) of the OUTPUTS outputs of an expert; its place is the expert, the first output and the
    first input. Beyond the ends zeros."""
    expert, first, k = place
    if TMA:
        tile = tl.reshape(W.load([expert, first, k]), (BLOCK_N, BLOCK_K))
    else:
        rows = first + tl.arange(0, BLOCK_N)
        columns = k + tl.arange(0, BLOCK_K)
        inside = (rows < OUTPUTS)[:, None] & (columns < K)[None, :]
        tile = tl.load(base + rows.to(tl.int64)[:, None] * PITCH + columns[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _block_scales(
    base,
    first,
    step,
    OUTPUTS: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE: tl.constexpr,
):
    """The scales of a tile's outputs: (1,) if ONE is for all, else (BLOCK_N,)."""
    if ONE:
        rows = first + tl.arange(0, 1)
    else:
        rows = tl.minimum(first + tl.arange(0, BLOCK_N), OUTPUTS - 1)
    return tl.load(base + step + (rows // BLOCK_ROWS).to(tl.int64) * PITCH)


@triton.jit(do_not_specialize=["num_inputs", "most_tiles", "group"])
def fp8_blocks_kernel(
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Any number of programs: Out (P, N), by row, of X (P, K), by row, with XScales (groups, T), or by row without an
    Order, and W (E, N, K), or W (E, 2 N, K) where an activation follows.

    A tile has BLOCK_N gates and what they gate, or 2 BLOCK_N outputs. Scales are for BLOCK_K inputs and BLOCK_ROWS
    outputs. W and X are tensor descriptors if TMA. STRIDES are as of `fp8_kernel`.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    OUTPUTS: tl.constexpr = 2 * N if GATED else N
    WIDTH: tl.constexpr = BLOCK_N if GATED else 2 * BLOCK_N
    TILES_N: tl.constexpr = (N + WIDTH - 1) // WIDTH
    PARTS: tl.constexpr = GATED and not INTERLEAVED  # gates and what they gate lie apart
    ONE: tl.constexpr = BLOCK_ROWS % BLOCK_N == 0 and (N % BLOCK_ROWS == 0 or not PARTS)
    num_tiles = tl.load(NumTiles)
    for tile in tl.range(tl.program_id(0), num_tiles * TILES_N, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = place_of(tile, num_tiles, TILES_N, group)
        expert = tl.load(Tiles + tile_m)
        first_row = tl.load(Tiles + most_tiles + tile_m)
        end = tl.load(Tiles + 2 * most_tiles + tile_m)
        first = tile_n * WIDTH
        first_w = first if PARTS or not GATED else 2 * first
        more_w = first_w + N if PARTS else first_w + BLOCK_N
        rows = first_row + tl.arange(0, BLOCK_M)
        has_row = rows < end
        inputs = rows
        if Order is not None:
            inputs = tl.load(Order + rows, mask=has_row, other=0) // TOP_K
        of_expert = W
        if not TMA:
            of_expert = W + expert.to(tl.int64) * STRIDES[0]
        s_base = Scales + expert.to(tl.int64) * STRIDES[2]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        m_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range((K + BLOCK_K - 1) // BLOCK_K):
            k = step * BLOCK_K
            if TMA:
                x = X.load([first_row, k])
            else:
                columns = k + tl.arange(0, BLOCK_K)
                known = has_row[:, None] & (columns < K)[None, :]
                x = tl.load(X + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=known, other=0.0)
            of_rows = tl.load(XScales + step * num_inputs + inputs, mask=has_row, other=0.0)
            scales = _block_scales(s_base, first_w, step, OUTPUTS, STRIDES[3], BLOCK_ROWS, BLOCK_N, ONE)
            m_scales = _block_scales(s_base, more_w, step, OUTPUTS, STRIDES[3], BLOCK_ROWS, BLOCK_N, ONE)
            w = _weights(W, of_expert, (expert, first_w, k), OUTPUTS, K, STRIDES[1], BLOCK_N, BLOCK_K, TMA)
            m_w = _weights(W, of_expert, (expert, more_w, k), OUTPUTS, K, STRIDES[1], BLOCK_N, BLOCK_K, TMA)
            if ONE:
                acc += tl.dot(x, tl.trans(w)) * (of_rows * scales)[:, None]
                m_acc += tl.dot(x, tl.trans(m_w)) * (of_rows * m_scales)[:, None]
            else:
                acc += tl.dot(x, tl.trans(w)) * (of_rows[:, None] * scales[None, :])
                m_acc += tl.dot(x, tl.trans(m_w)) * (of_rows[:, None] * m_scales[None, :])
        if PARTS:
            finish(acc, m_acc, Bias, Out, expert, first, (rows, has_row), N, False, ACTIVATION, ALPHA, LIMIT)
        elif GATED:
            half = first + BLOCK_N // 2
            gate, up = gate_and_up(acc, True)
            finish(gate, up, Bias, Out, expert, first, (rows, has_row), N, True, ACTIVATION, ALPHA, LIMIT)
            gate, up = gate_and_up(m_acc, True)
            finish(gate, up, Bias, Out, expert, half, (rows, has_row), N, True, ACTIVATION, ALPHA, LIMIT)
        else:
            finish(acc, acc, Bias, Out, expert, first, (rows, has_row), N, False, None, ALPHA, LIMIT)
            finish(m_acc, m_acc, Bias, Out, expert, first + BLOCK_N, (rows, has_row), N, False, None, ALPHA, LIMIT)
