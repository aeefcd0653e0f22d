"""Products of one token with its experts, each weight read once, and the weighted sum of its results.

Products are made in the ordinary units, of fp32: a thread multiplies the weights that it has loaded, and adds them up
over the inputs. So nothing is prepared for rows that are not there, and a program may be small. Programs are many, and
each has loads in flight while it multiplies.

The kernel downwards may begin while the one upwards ends: it loads its first weights, and then waits for its inputs.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.linear.unpack import (
    ASSEMBLED,
    FP8,
    HALF,
    INT4_ZEROS,
    MXFP4,
    e8m0_scales,
    int4_shifts,
    sum_factor,
    word_numbers,
)
from longreach_kernels.moe.activation_kernel import activate


@triton.jit
def _begin(PDL: tl.constexpr):
    """Wait for the kernel before."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _let_begin(PDL: tl.constexpr):
    """Let the kernel behind begin, as far as it needs nothing of this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _half_sums(X, W, inputs, outputs, K: tl.constexpr, BLOCK_K: tl.constexpr, WAITS: tl.constexpr):
    """`_sums` of weights of 16 or 32 bits."""
    x_places, has_x = inputs
    w_places, inside = outputs
    offs = tl.arange(0, BLOCK_K)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    there = inside[:, :, None]
    w_ptrs = W + w_places[:, :, None] + offs[None, None, :]
    known = there if EVEN else there & (offs < K)[None, None, :]
    w = tl.load(w_ptrs, mask=known, other=0.0, eviction_policy="evict_first")
    _begin(WAITS)
    acc = tl.zeros(w.shape, tl.float32)
    for start in range(0, K, BLOCK_K):
        in_row = has_x[:, None] & (start + offs < K)[None, :]
        x = tl.load(X + x_places[:, None] + start + offs[None, :], mask=in_row, other=0.0).to(tl.float32)
        following = there & (start + BLOCK_K + offs < K)[None, None, :]
        then = tl.load(w_ptrs + start + BLOCK_K, mask=following, other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * x[:, None, :]
        w = then
    return tl.sum(acc, 2)


@triton.jit
def _planes(x, PER_WORD: tl.constexpr):
    """Of inputs (A, STEP) four or eight (A, 1, STEP / PER_WORD): every fourth or eighth, from the first on, .."""
    A: tl.constexpr = x.shape[0]
    WORDS: tl.constexpr = x.shape[1] // PER_WORD
    if PER_WORD == 4:
        even, odd = tl.split(tl.reshape(x, (A, 1, WORDS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        planes = (x0, x1, x2, x3)
    else:
        even, odd = tl.split(tl.reshape(x, (A, 1, WORDS, 2, 2, 2)))
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x1, x5 = tl.split(x15)
        x2, x6 = tl.split(x26)
        x3, x7 = tl.split(x37)
        planes = (x0, x1, x2, x3, x4, x5, x6, x7)
    return planes


@triton.jit
def _spread(values, WORDS: tl.constexpr):
    """Values (.., groups) for each word (.., WORDS)."""
    A: tl.constexpr = values.shape[0]
    B: tl.constexpr = values.shape[1]
    GROUPS: tl.constexpr = values.shape[2]
    return tl.reshape(tl.broadcast_to(values[:, :, :, None], (A, B, GROUPS, WORDS // GROUPS)), (A, B, WORDS))


@triton.jit
def _packed_sums(
    X,
    weight,
    inputs,
    outputs,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAITS: tl.constexpr,
):
    """`_sums` of packed weights."""
    W, Scales, Zeros = weight
    x_places, has_x = inputs
    w_places, inside, s_places = outputs
    # All numbers of all formats are exact in bf16. The interpreter lacks it.
    dtype: tl.constexpr = tl.bfloat16 if ASSEMBLED else tl.float32
    PER_WORD: tl.constexpr = 4 if FORMAT == FP8 else 8
    WORDS: tl.constexpr = BLOCK_K // PER_WORD
    SIZE: tl.constexpr = K if GROUP == 0 else GROUP
    COLUMNS: tl.constexpr = (K + SIZE - 1) // SIZE
    GROUPS: tl.constexpr = BLOCK_K // SIZE if SIZE < BLOCK_K and GROUP > 0 else 1
    place = tl.arange(0, WORDS)
    offs = tl.arange(0, BLOCK_K)
    column = tl.arange(0, GROUPS)
    there = inside[:, :, None]
    w_ptrs = W + w_places[:, :, None] + place[None, None, :]
    s_ptrs = s_places[:, :, None] + tl.zeros((1, 1, GROUPS), tl.int64)
    known = there & (place < K // PER_WORD)[None, None, :]
    words = tl.load(w_ptrs, mask=known, other=0, eviction_policy="evict_first")
    _begin(WAITS)
    acc = tl.zeros(words.shape, tl.float32)
    for start in range(0, K, BLOCK_K):
        following = there & (start // PER_WORD + WORDS + place < K // PER_WORD)[None, None, :]
        then = tl.load(w_ptrs + start // PER_WORD + WORDS, mask=following, other=0, eviction_policy="evict_first")
        of_step = tl.minimum(column + start // SIZE, COLUMNS - 1)
        scales = tl.load(Scales + s_ptrs + of_step[None, None, :], mask=there, other=0)
        zeros = scales
        if FORMAT == INT4_ZEROS:
            zeros = tl.load(Zeros + s_ptrs + of_step[None, None, :], mask=there, other=0)
        in_row = has_x[:, None] & (start + offs < K)[None, :]
        x = tl.load(X + x_places[:, None] + start + offs[None, :], mask=in_row, other=0.0).to(tl.float32)
        planes = _planes(x, PER_WORD)
        numbers = word_numbers(words, _spread(int4_shifts(zeros, FORMAT, dtype), WORDS), FORMAT, dtype)
        part = numbers[0].to(tl.float32) * planes[0]
        for number in tl.static_range(1, PER_WORD):
            part += numbers[number].to(tl.float32) * planes[number]
        if GROUP == 0:
            acc += part
        else:
            ready = e8m0_scales(scales, dtype) if FORMAT == MXFP4 else scales
            acc += part * _spread(ready.to(tl.float32), WORDS)
        words = then
    sums = tl.sum(acc, 2) * sum_factor(FORMAT, dtype)
    if GROUP == 0:
        sums *= tl.load(Scales + s_places, mask=inside, other=0).to(tl.float32)
    return sums


@triton.jit
def _sums(
    X,
    weight,
    inputs,
    outputs,
    K: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Products (A, BLOCK_N) in fp32 of outputs with rows of X.

    Args:
        weight: (W, Scales, Zeros) as the formats have them.
        inputs: the places of the first inputs of rows in X, and which rows there are: (A,), or (1,) of one for all.
        outputs: places of the first words, which there are, and places of the first scales, each (A, BLOCK_N).
        LAYOUT: (FORMAT, GROUP, BLOCK_ROWS) as of `packed_product`.
        WAITS: whether what X points to is computed by the kernel before, for which nothing has waited yet.
    """
    w_places, inside, s_places = outputs
    if LAYOUT[0] == HALF:
        sums = _half_sums(X, weight[0], inputs, (w_places, inside), K, BLOCK_K, WAITS)
    else:
        sums = _packed_sums(X, weight, inputs, (w_places, inside, s_places), K, LAYOUT[0], LAYOUT[1], BLOCK_K, WAITS)
    return sums


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
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of outputs, k): Out (k, N) of X (1, K) and W (E, N, K), or W (E, 2 N, K) where an activation
    follows. Rows of experts that are not here are not written. STRIDES are as of `few_kernel`."""
    _begin(PDL)
    _let_begin(PDL)
    rank = tl.program_id(1)
    expert = tl.load(Chosen + rank).to(tl.int32) - FIRST
    if (expert < 0) | (expert >= E):
        return
    GATED: tl.constexpr = ACTIVATION is not None
    PARTS: tl.constexpr = 2 if GATED else 1
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.arange(0, PARTS)
    outputs = columns[None, :] * 2 + part[:, None] if INTERLEAVED else columns[None, :] + part[:, None] * N
    inside = (columns < N)[None, :] & (part >= 0)[:, None]
    w_places = expert.to(tl.int64) * STRIDES[0] + outputs.to(tl.int64) * STRIDES[1]
    s_places = expert.to(tl.int64) * STRIDES[2] + (outputs // LAYOUT[2]).to(tl.int64) * STRIDES[3]
    one = tl.arange(0, 1)
    sums = _sums(X, (W, Scales, Zeros), (one, one == 0), (w_places, inside, s_places), K, LAYOUT, BLOCK_K, False)
    if Bias is not None:
        sums += tl.load(Bias + expert * (PARTS * N) + outputs, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.trans(sums))
        results = activate(gate, up, ACTIVATION, ALPHA, LIMIT)
    else:
        results = tl.sum(sums, 0)
    tl.store(Out + rank.to(tl.int64) * N + columns, results.to(Out.dtype.element_ty), mask=columns < N)


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
    RANKS: tl.constexpr,
    STRIDES: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of outputs,): Out (1, N) = SCALE * the sum of Weights (TOP_K,) times the products of X (TOP_K, K)
    and W (E, N, K), or plus that if ADD, rounded once; products are rounded before. RANKS are TOP_K or more."""
    _let_begin(PDL)
    rank = tl.arange(0, RANKS)
    # Experts are chosen before the kernel before begins.
    expert = tl.load(Chosen + rank, mask=rank < TOP_K, other=-1).to(tl.int32) - FIRST
    here = (rank < TOP_K) & (expert >= 0) & (expert < E)
    expert = tl.where(here, expert, 0)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = here[:, None] & (outputs < N)[None, :]
    w_places = expert.to(tl.int64)[:, None] * STRIDES[0] + outputs.to(tl.int64)[None, :] * STRIDES[1]
    s_places = expert.to(tl.int64)[:, None] * STRIDES[2] + (outputs // LAYOUT[2]).to(tl.int64)[None, :] * STRIDES[3]
    sums = _sums(X, (W, Scales, Zeros), (rank * K, here), (w_places, inside, s_places), K, LAYOUT, BLOCK_K, PDL)
    if Bias is not None:
        sums += tl.load(Bias + expert[:, None] * N + outputs[None, :], mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(Weights + rank, mask=here, other=0.0).to(tl.float32)
    total = tl.sum(sums.to(Out.dtype.element_ty).to(tl.float32) * weights[:, None], 0)
    if SCALE != 1.0:
        total *= SCALE
    if ADD:
        total += tl.load(Out + outputs, mask=outputs < N, other=0.0).to(tl.float32)
    tl.store(Out + outputs, total.to(Out.dtype.element_ty), mask=outputs < N)
