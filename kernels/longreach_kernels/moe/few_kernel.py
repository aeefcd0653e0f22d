"""Products of experts with few rows each: a program reads a block of one expert's weights once, for all of its rows.

Such a product computes next to nothing, and memory must never be idle. The weights are the left operand of the product,
so that a matrix instruction is filled by outputs, and not by rows that are not there. They may have any format. Rows
stay in 16 bits, but where FP8_ROWS: FP8 is multiplied as it lies.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.linear.unpack import HALF
from longreach_kernels.moe.activation_kernel import activate
from longreach_kernels.moe.packed_product import packed_product


@triton.jit
def _half_product(
    X,
    W,
    rows,
    outputs,
    UP: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`packed_product` of a weight of 16 or 32 bits, whose outputs are dense."""
    row_places, has_row = rows
    rows_w, inside = outputs
    ROWS: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    BLOCK_K: tl.constexpr = TILE[2]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    acc_up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    w_ptrs = W + rows_w.to(tl.int64)[:, None] * K + offs_k[None, :]
    x_ptrs = X + row_places[None, :] + offs_k[:, None]
    for start in range(0, K, BLOCK_K):
        w_mask = inside[:, None]
        x_mask = has_row[None, :]
        if K % BLOCK_K != 0:
            known = start + offs_k < K
            w_mask = w_mask & known[None, :]
            x_mask = x_mask & known[:, None]
        w = tl.load(w_ptrs + start, mask=w_mask, other=0.0)
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if GATED:
            w_up = tl.load(w_ptrs + UP * K + start, mask=w_mask, other=0.0)
            acc_up = tl.dot(w_up, x, acc_up, input_precision=PRECISION)
    return acc, acc_up


@triton.jit
def _fp8_product(
    X,
    W,
    Scales,
    rows,
    outputs,
    UP: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BY_GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GATED: tl.constexpr,
):
    """`packed_product` of FP8 as it lies, with rows that are quantised here, by row and BLOCK_K inputs. Scales are for
    BLOCK_K inputs if BY_GROUP, else for all."""
    row_places, has_row = rows
    rows_w, inside = outputs
    ROWS: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    BLOCK_K: tl.constexpr = TILE[2]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    acc_up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    w_ptrs = W + rows_w.to(tl.int64)[:, None] * STRIDES[1] + offs_k[None, :]
    x_ptrs = X + row_places[:, None] + offs_k[None, :]
    s_ptrs = Scales + (rows_w // BLOCK_ROWS).to(tl.int64) * STRIDES[3]
    u_ptrs = Scales + ((rows_w + UP) // BLOCK_ROWS).to(tl.int64) * STRIDES[3]
    # Scales are loaded a turn before they are used: loads of so few bytes are not part of the pipeline.
    scales = tl.load(s_ptrs, mask=inside, other=0.0)
    up_scales = scales
    if GATED:
        up_scales = tl.load(u_ptrs, mask=inside, other=0.0)
    for start in range(0, K, BLOCK_K):
        w_mask = inside[:, None]
        x_mask = has_row[:, None]
        if K % BLOCK_K != 0:
            known = (start + offs_k < K)[None, :]
            w_mask = w_mask & known
            x_mask = x_mask & known
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptrs + start, mask=w_mask, other=0.0)
        greatest = tl.max(tl.abs(x), 1)
        of_rows = tl.where(greatest > 0.0, greatest / 448.0, 1.0)
        values = tl.trans((x / of_rows[:, None]).to(tl.float8e4nv))
        now, up_now = scales, up_scales
        if BY_GROUP:
            following = inside & (start + BLOCK_K < K)
            scales = tl.load(s_ptrs + start // BLOCK_K + 1, mask=following, other=0.0)
            acc += tl.dot(w, values) * (now[:, None] * of_rows[None, :])
        else:
            acc += tl.dot(w, values) * of_rows[None, :]
        if GATED:
            w_up = tl.load(w_ptrs + UP * STRIDES[1] + start, mask=w_mask, other=0.0)
            if BY_GROUP:
                up_scales = tl.load(u_ptrs + start // BLOCK_K + 1, mask=following, other=0.0)
                acc_up += tl.dot(w_up, values) * (up_now[:, None] * of_rows[None, :])
            else:
                acc_up += tl.dot(w_up, values) * of_rows[None, :]
    if not BY_GROUP:
        acc *= scales[:, None]
        acc_up *= up_scales[:, None]
    return acc, acc_up


@triton.jit(do_not_specialize=["most_tiles"])
def few_kernel(
    X,
    W,
    Scales,
    Zeros,
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
    STRIDES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FP8_ROWS: tl.constexpr,
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
    Order, and W (E, N, K), or W (E, 2 N, K) where an activation follows. Without Tiles the pairs of one token are the
    tiles and the rows; X has that token's row alone if ONE_TOKEN.

    STRIDES are those of W's experts and outputs, and of the scales' and zeros' experts and outputs,
    or blocks of these.
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
    inputs = rows
    if Order is not None:
        inputs = tl.load(Order + rows, mask=has_row, other=0) // TOP_K
    elif ONE_TOKEN:
        inputs = rows // TOP_K
    row_places = inputs.to(tl.int64) * K
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_n < N
    rows_w = offs_n * 2 if INTERLEAVED else offs_n
    UP: tl.constexpr = 1 if INTERLEAVED else N
    w_base = W + expert.to(tl.int64) * STRIDES[0]
    if FORMAT == HALF:
        acc, acc_up = _half_product(
            X, w_base, (row_places, has_row), (rows_w, inside), UP, K, (ROWS, BLOCK_N, BLOCK_K), GATED, PRECISION
        )
    elif FP8_ROWS:
        acc, acc_up = _fp8_product(
            X,
            w_base,
            Scales + expert.to(tl.int64) * STRIDES[2],
            (row_places, has_row),
            (rows_w, inside),
            UP,
            K,
            STRIDES,
            GROUP > 0,
            BLOCK_ROWS,
            (ROWS, BLOCK_N, BLOCK_K),
            GATED,
        )
    else:
        s_base = Scales + expert.to(tl.int64) * STRIDES[2]
        z_base = s_base
        if Zeros is not None:
            z_base = Zeros + expert.to(tl.int64) * STRIDES[2]
        acc, acc_up = packed_product(
            X,
            (w_base, s_base, z_base),
            (row_places, has_row),
            (rows_w, inside),
            UP,
            K,
            STRIDES,
            (FORMAT, GROUP, BLOCK_ROWS),
            (ROWS, BLOCK_N, BLOCK_K),
            GATED,
            PRECISION,
        )
    if Bias is not None:
        bias = Bias + expert * ((2 if GATED else 1) * N) + rows_w
        acc += tl.load(bias, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias + UP, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activate(acc, acc_up, ACTIVATION, ALPHA, LIMIT)
    out = Out + rows.to(tl.int64)[None, :] * N + offs_n[:, None]
    tl.store(out, acc.to(Out.dtype.element_ty), mask=inside[:, None] & has_row[None, :])
