"""Products of one token with its experts: each weight is read once, multiplied in the registers and added up.

One row would leave most of a matrix instruction empty. Here a program has a few outputs and all of their inputs, so
that there are many programs, and nothing passes through shared memory. Weights may have any format.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.linear.unpack import FP8, HALF, MXFP4, e8m0_scales, int4_shifts, sum_factor, word_numbers
from longreach_kernels.moe.activation_kernel import activate


@triton.jit
def _outputs(
    X,
    W,
    Scales,
    Zeros,
    rows_w,
    inside,
    K: tl.constexpr,
    PITCH: tl.constexpr,
    PITCH_S: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The outputs `rows_w` (BLOCK_N,) of a weight (N, K) and a row X (K,), in fp32."""
    w_rows = W + rows_w.to(tl.int64)[:, None] * PITCH
    if FORMAT == HALF:
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        offs = tl.arange(0, BLOCK_K)
        for start in range(0, K, BLOCK_K):
            known = start + offs < K
            w = tl.load(w_rows + (start + offs)[None, :], mask=inside[:, None] & known[None, :], other=0.0)
            x = tl.load(X + start + offs, mask=known, other=0.0)
            acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    else:
        PER_WORD: tl.constexpr = 4 if FORMAT == FP8 else 8
        dtype: tl.constexpr = X.dtype.element_ty
        WORDS: tl.constexpr = BLOCK_K // PER_WORD
        acc = tl.zeros((BLOCK_N, WORDS), tl.float32)
        s_rows = (rows_w // BLOCK_ROWS).to(tl.int64)[:, None] * PITCH_S
        factor = sum_factor(FORMAT, dtype)
        for start in range(0, K, BLOCK_K):
            place = start // PER_WORD + tl.arange(0, WORDS)
            known = place < K // PER_WORD
            valid = inside[:, None] & known[None, :]
            words = tl.load(w_rows + place[None, :], mask=valid, other=0)
            group = place * 0 if GROUP == 0 else place * PER_WORD // GROUP
            scales = tl.load(Scales + s_rows + group[None, :], mask=valid, other=0)
            zeros = scales
            if Zeros is not None:
                zeros = tl.load(Zeros + s_rows + group[None, :], mask=valid, other=0)
            numbers = word_numbers(words, int4_shifts(zeros, FORMAT, dtype), FORMAT, dtype)
            part = tl.zeros((BLOCK_N, WORDS), tl.float32)
            for number in tl.static_range(PER_WORD):
                x = tl.load(X + place * PER_WORD + number, mask=known, other=0.0).to(tl.float32) * factor
                part += numbers[number].to(tl.float32) * x[None, :]
            if FORMAT == MXFP4:
                acc += part * e8m0_scales(scales, dtype).to(tl.float32)
            else:
                acc += part * scales.to(tl.float32)
    return tl.sum(acc, 1)


@triton.jit
def _of_expert(Values, expert, STRIDE: tl.constexpr):
    """Where an expert's values begin; None where there are none."""
    if Values is None:
        begin = None
    else:
        begin = Values + expert.to(tl.int64) * STRIDE
    return begin


@triton.jit
def one_up_kernel(
    X,
    W,
    Scales,
    Zeros,
    Bias,
    Out,
    Chosen,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    STRIDES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid (blocks of outputs, k): Out (k, N) of X (1, K) and W (E, N, K), or W (E, 2 N, K) where an activation
    follows. STRIDES are those of W's experts and outputs, and of the scales' and zeros' experts and outputs, or blocks
    of these."""
    pair = tl.program_id(1)
    expert = tl.load(Chosen + pair).to(tl.int32) - FIRST
    if (expert < 0) | (expert >= E):
        return
    GATED: tl.constexpr = ACTIVATION is not None
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs < N
    rows = offs * 2 if INTERLEAVED else offs
    UP: tl.constexpr = 1 if INTERLEAVED else N
    w = W + expert.to(tl.int64) * STRIDES[0]
    scales = _of_expert(Scales, expert, STRIDES[2])
    zeros = _of_expert(Zeros, expert, STRIDES[2])
    total = _outputs(
        X, w, scales, zeros, rows, inside, K, STRIDES[1], STRIDES[3], FORMAT, GROUP, BLOCK_ROWS, BLOCK_N, BLOCK_K
    )
    if Bias is not None:
        bias = Bias + expert * ((2 if GATED else 1) * N) + rows
        total += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = _outputs(
            X, w, scales, zeros, rows + UP, inside, K, STRIDES[1], STRIDES[3], FORMAT, GROUP, BLOCK_ROWS,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if Bias is not None:
            up += tl.load(bias + UP, mask=inside, other=0.0).to(tl.float32)
        total = activate(total, up, ACTIVATION, ALPHA, LIMIT)
    tl.store(Out + pair * N + offs, total.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def one_down_kernel(
    X,
    W,
    Scales,
    Zeros,
    Bias,
    Out,
    Chosen,
    Weights,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Grid (blocks of outputs,): Out (1, N) of X (k, K) and W (E, N, K), times the pairs' weights, in their order.
    STRIDES as in `one_up_kernel`."""
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs < N
    total = tl.zeros((BLOCK_N,), tl.float32)
    for pair in range(TOP_K):
        expert = tl.load(Chosen + pair).to(tl.int32) - FIRST
        if (expert >= 0) & (expert < E):
            result = _outputs(
                X + pair * K,
                W + expert.to(tl.int64) * STRIDES[0],
                _of_expert(Scales, expert, STRIDES[2]),
                _of_expert(Zeros, expert, STRIDES[2]),
                offs, inside, K, STRIDES[1], STRIDES[3], FORMAT, GROUP, BLOCK_ROWS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if Bias is not None:
                result += tl.load(Bias + expert * N + offs, mask=inside, other=0.0).to(tl.float32)
            total += result * tl.load(Weights + pair).to(tl.float32)
    if SCALE != 1.0:
        total *= SCALE
    if ADD:
        total += tl.load(Out + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + offs, total.to(Out.dtype.element_ty), mask=inside)
