"""Products of experts with few rows each: a program reads a block of one expert's weights once, for all of its rows.

Such a product computes next to nothing, and memory must never be idle. The weights are the left operand of the product,
so that a matrix instruction is filled by outputs, and not by rows that are not there.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.moe.activation_kernel import activate


@triton.jit(do_not_specialize=["most_tiles"])
def few_kernel(
    X,
    W,
    Bias,
    Out,
    Chosen,
    Order,
    Tiles,
    NumTiles,
    most_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of outputs, tiles of rows): Out (P, N), by row, of X (T, K), or (P, K) by row where there is no
    Order, and W (E, N, K), or W (E, 2 N, K) where an activation follows.

    Without Tiles the pairs of one token are the tiles and the rows. X has that token's row alone if ONE_TOKEN.
    """
    tile = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    if Tiles is not None:
        if tile >= tl.load(NumTiles):
            return
        expert = tl.load(Tiles + tile)
        rows += tl.load(Tiles + most_tiles + tile)
        has_row = rows < tl.load(Tiles + 2 * most_tiles + tile)
    else:
        expert = tl.load(Chosen + tile).to(tl.int32) - FIRST
        if (expert < 0) | (expert >= E):
            return
        has_row = rows == 0
        rows += tile
    GATED: tl.constexpr = ACTIVATION is not None
    if Order is not None:
        inputs = tl.load(Order + rows, mask=has_row, other=0) // TOP_K
    elif ONE_TOKEN:
        inputs = rows // TOP_K
    else:
        inputs = rows
    x_ptrs = X + inputs.to(tl.int64) * K
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    inside = offs_n < N
    gate_rows = offs_n * 2 if INTERLEAVED else offs_n
    OTHER: tl.constexpr = 1 if INTERLEAVED else N
    w_base = W + expert.to(tl.int64) * ((2 if GATED else 1) * N * K)
    w_ptrs = w_base + gate_rows.to(tl.int64)[:, None] * K + offs_k[None, :]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    acc_up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            w_mask = inside[:, None]
            x_mask = has_row[None, :]
        else:
            known = start + offs_k < K
            w_mask = inside[:, None] & known[None, :]
            x_mask = has_row[None, :] & known[:, None]
        w = tl.load(w_ptrs + start, mask=w_mask, other=0.0)
        x = tl.load(x_ptrs[None, :] + start + offs_k[:, None], mask=x_mask, other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(w_ptrs + OTHER * K + start, mask=w_mask, other=0.0)
            acc_up = tl.dot(up, x, acc_up, input_precision=PRECISION)
    if Bias is not None:
        bias = Bias + expert * ((2 if GATED else 1) * N) + gate_rows
        acc += tl.load(bias, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias + OTHER, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activate(acc, acc_up, ACTIVATION, ALPHA, LIMIT)
    out = Out + rows.to(tl.int64)[None, :] * N + offs_n[:, None]
    tl.store(out, acc.to(Out.dtype.element_ty), mask=inside[:, None] & has_row[None, :])
