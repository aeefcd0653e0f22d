"""What a chunk of a prompt has in itself, in Triton: the inverse of its triangular system, and scores of its queries.

All chunks are computed side by side. A chunk is cut into blocks of 16 tokens. A warp inverts a block's own system, all
blocks at once; then pairs of neighbours are joined.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.backends.triton.primitives import find_sequence

SIDE: tl.constexpr = tl.constexpr(16)  # tokens of a block
_PRECISION: tl.constexpr = tl.constexpr("tf32x3")
_LEAST: tl.constexpr = tl.constexpr(-1000.0)  # exp of anything below is 0 as well


@triton.jit
def product(a, b, added=None):
    """a b, or plus what is added, summed in fp32. A number of fp32 is taken as two of 11 bits."""
    return tl.dot(a, b, acc=added, input_precision=_PRECISION)


@triton.jit
def _rows(X, rows, inside, stride, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows of keys or queries."""
    offs_d = tl.arange(0, BLOCK_K)
    places = rows.to(tl.int64)[:, None] * stride + offs_d[None, :]
    return tl.load(X + places, mask=inside[:, None] & (offs_d < KEY_DIM)[None, :], other=0.0)


@triton.jit
def _norm_factors(x, epsilon, NORMALISE: tl.constexpr):
    """What each row is multiplied by to have length 1."""
    x = x.to(tl.float32)
    squares = tl.sum(x * x, 1)
    return tl.rsqrt(squares + epsilon) if NORMALISE else tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def _diagonal(a, SIZE: tl.constexpr):
    """The blocks (N, SIZE, SIZE) on the diagonal of a square."""
    COUNT: tl.constexpr = a.shape[0] // SIZE
    n = tl.arange(0, COUNT)
    mine = n[:, None, None, None] == n[None, None, :, None]
    return tl.sum(tl.where(mine, tl.reshape(a, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)


@triton.jit
def _inverses(a):
    """(1 + a)^-1 for strictly lower triangular a (N, 16, 16): of blocks of two rows, then of four, eight and all.

    Two neighbouring blocks with inverses X and Y have ``-Y a X`` below them. No powers of ``a`` are taken: they may be
    large where the inverse is small.
    """
    i = tl.arange(0, SIDE)[None, :, None]
    j = tl.arange(0, SIDE)[None, None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -a, 0.0))
    for level in tl.static_range(1, 4):
        joined = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        x -= product(product(x, tl.where(joined, a, 0.0)), x)
    return x


@triton.jit
def _joined(x, a):
    """Inverses (N / 2, 2 S, 2 S) of twice as many rows, from those (N, S, S) of the blocks on the diagonal of 1 + a."""
    SIZE: tl.constexpr = x.shape[1]
    COUNT: tl.constexpr = x.shape[0] // 2
    half = tl.arange(0, 2)
    pairs = tl.reshape(x, (COUNT, 2, SIZE, SIZE))
    upper = tl.sum(tl.where((half == 0)[None, :, None, None], pairs, 0.0), 1)
    lower = tl.sum(tl.where((half == 1)[None, :, None, None], pairs, 0.0), 1)
    corners = tl.reshape(_diagonal(a, 2 * SIZE), (COUNT, 2, SIZE, 2, SIZE))
    in_corner = (half == 1)[None, :, None, None, None] & (half == 0)[None, None, None, :, None]
    corner = tl.sum(tl.sum(tl.where(in_corner, corners, 0.0), 3), 1)
    if COUNT == 1:
        lower, corner, upper = (
            tl.reshape(lower, (SIZE, SIZE)),
            tl.reshape(corner, (SIZE, SIZE)),
            tl.reshape(upper, (SIZE, SIZE)),
        )
    corner = tl.reshape(-product(product(lower, corner), upper), (COUNT, SIZE, SIZE))
    on_diagonal = half[None, :, None, None, None] == half[None, None, None, :, None]
    square = tl.where(on_diagonal, pairs[:, :, :, None, :], tl.where(in_corner, corner[:, None, :, None, :], 0.0))
    return tl.reshape(square, (COUNT, 2 * SIZE, 2 * SIZE))


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["CuQ"])
def solve_kernel(
    Q,
    K,
    LogDecay,
    Beta,
    Inverse,
    Scores,
    Factors,
    Decays,
    CuQ,
    num_seqs,
    scale,
    epsilon,
    strides_q,
    strides_k,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALISE: tl.constexpr,
    FOLD_KEYS: tl.constexpr,
):
    """Grid (chunks, Hv). For each: Inverse and Scores (CHUNK, CHUNK); Factors (4, CHUNK) and Decays, a number, fp32.

    Inverse is (1 + A)^-1 times the betas of its columns. A_ij is beta_i k_i k_j times the decay between the two tokens,
    for j before i. Scores are ``scale q_i k_j`` times that decay, for j not after i. Factors are those of the norms of
    keys; of what the chunk's first state knows of a key; of what a query reads from it; and of what is left of a change
    at the chunk's end. FOLD_KEYS: the second and fourth have the first in them, and keys can be taken as they are.

    Sums of decays are fp64, as two numbers of fp32. A difference of sums of fp32 has lost its digits where a strong
    decay lies before both.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    seq, first = find_sequence(CuQ, num_seqs, chunk, CHUNK)
    start = tl.load(CuQ + seq) + (chunk - first) * CHUNK
    end = tl.load(CuQ + seq + 1)
    if start < end:
        key_head = head // (HEADS // KEY_HEADS)
        place = chunk.to(tl.int64) * HEADS + head
        i = tl.arange(0, CHUNK)
        rows = start + i
        inside = rows < end
        k = _rows(K + key_head * strides_k[1], rows, inside, strides_k[0], KEY_DIM, BLOCK_K)
        q = _rows(Q + key_head * strides_q[1], rows, inside, strides_q[0], KEY_DIM, BLOCK_K)
        numbers = rows.to(tl.int64) * HEADS + head
        decay = tl.load(LogDecay + numbers, mask=inside, other=0.0)
        beta = tl.load(Beta + numbers, mask=inside, other=0.0).to(tl.float32)
        k_norms = _norm_factors(k, epsilon, NORMALISE)
        q_norms = scale * _norm_factors(q, epsilon, NORMALISE)
        sums = tl.cumsum(tl.where(decay < _LEAST, _LEAST, decay).to(tl.float64), 0)
        total = tl.sum(tl.where(i == CHUNK - 1, sums, 0.0), 0)
        high = sums.to(tl.float32)
        low = (sums - high.to(tl.float64)).to(tl.float32)
        from_start = tl.exp(high)
        to_end = tl.exp((total - sums).to(tl.float32))

        between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        weights = tl.exp(tl.where(i[:, None] >= i[None, :], between, float("-inf"))) * k_norms[None, :]
        scores = product(q, tl.trans(k)) * q_norms[:, None] * weights
        square = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
        tl.store(Scores + square, scores.to(Scores.dtype.element_ty))
        system = product(k, tl.trans(k)) * (beta * k_norms)[:, None] * weights
        system = tl.where(i[:, None] > i[None, :], system, 0.0)
        inverse = _inverses(_diagonal(system, SIDE))
        inverse = _joined(inverse, system)
        if CHUNK == 64:
            inverse = _joined(inverse, system)
        inverse = tl.reshape(inverse, (CHUNK, CHUNK)) * beta[None, :]
        tl.store(Inverse + square, inverse.to(Inverse.dtype.element_ty))

        factors = Factors + place * (4 * CHUNK) + i
        tl.store(factors, k_norms)
        tl.store(factors + CHUNK, from_start * k_norms if FOLD_KEYS else from_start)
        tl.store(factors + 2 * CHUNK, from_start * q_norms)
        tl.store(factors + 3 * CHUNK, to_end * k_norms if FOLD_KEYS else to_end)
        tl.store(Decays + place, tl.exp(total.to(tl.float32)))
