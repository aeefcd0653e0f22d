"""What a chunk of a prompt has in itself, in Triton: the inverse of its triangular system, and scores of its queries.

All chunks are computed side by side. A chunk goes by blocks of 16 tokens, whose inverses are made of small products.
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
def _inverse(a):
    """(1 + a)^-1 for a strictly lower triangular a (16, 16): of blocks of two rows, then of four, eight and all.

    Two neighbouring blocks with inverses X and Y have ``-Y a X`` below them. No powers of ``a`` are taken: they may be
    large where the inverse is small.
    """
    i = tl.arange(0, SIDE)[:, None]
    j = tl.arange(0, SIDE)[None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -a, 0.0))
    for level in tl.static_range(1, 4):
        joined = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        x -= product(product(x, tl.where(joined, a, 0.0)), x)
    return x


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

    Logarithms of decays are sums of neighbours, never differences of sums from the start: these have lost their digits
    where a strong decay lies before both.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    seq, first = find_sequence(CuQ, num_seqs, chunk, CHUNK)
    start = tl.load(CuQ + seq) + (chunk - first) * CHUNK
    end = tl.load(CuQ + seq + 1)
    if start < end:
        key_head = head // (HEADS // KEY_HEADS)
        place = chunk.to(tl.int64) * HEADS + head
        Q += key_head * strides_q[1]
        K += key_head * strides_k[1]
        Factors += place * (4 * CHUNK)
        i = tl.arange(0, SIDE)
        j = tl.arange(0, CHUNK)
        k = _rows(K, start + j, start + j < end, strides_k[0], KEY_DIM, BLOCK_K)
        norms = _norm_factors(k, epsilon, NORMALISE)
        betas = tl.load(Beta + (start + j).to(tl.int64) * HEADS + head, mask=start + j < end, other=0.0).to(tl.float32)
        inverse = tl.zeros((CHUNK, CHUNK), tl.float32)
        to_here = tl.zeros((CHUNK,), tl.float32)  # log decay from after token j to the end of the last block
        so_far = 0.0
        for block in range(CHUNK // SIDE):
            local = block * SIDE + i
            rows = start + local
            inside = rows < end
            q_block = _rows(Q, rows, inside, strides_q[0], KEY_DIM, BLOCK_K)
            k_block = _rows(K, rows, inside, strides_k[0], KEY_DIM, BLOCK_K)
            q_norms = scale * _norm_factors(q_block, epsilon, NORMALISE)
            k_norms = _norm_factors(k_block, epsilon, NORMALISE)
            beta = tl.load(Beta + rows.to(tl.int64) * HEADS + head, mask=inside, other=0.0).to(tl.float32)
            decay = tl.load(LogDecay + rows.to(tl.int64) * HEADS + head, mask=inside, other=0.0)
            decay = tl.where(decay < _LEAST, _LEAST, decay)

            between = tl.cumsum(tl.where(i[:, None] > i[None, :], decay[:, None], 0.0), 0)
            own = product(k_block, tl.trans(k_block)) * (beta * k_norms)[:, None] * k_norms[None, :] * tl.exp(between)
            own = _inverse(tl.where(i[:, None] > i[None, :], own, 0.0))

            until = to_here[None, :] + tl.cumsum(tl.where(local[:, None] > j[None, :], decay[:, None], 0.0), 0)
            weights = tl.where(local[:, None] >= j[None, :], tl.exp(until) * norms[None, :], 0.0)
            system = product(k_block, tl.trans(k)) * (beta * k_norms)[:, None] * weights
            system = tl.where(j[None, :] < block * SIDE, system, 0.0)
            right = tl.where(local[:, None] == j[None, :], 1.0, 0.0) - product(system, inverse)
            solved = product(own, right)
            scores = product(q_block, tl.trans(k)) * q_norms[:, None] * weights

            places = place * (CHUNK * CHUNK) + local[:, None] * CHUNK + j[None, :]
            tl.store(Inverse + places, (solved * betas[None, :]).to(Inverse.dtype.element_ty))
            tl.store(Scores + places, scores.to(Scores.dtype.element_ty))
            from_start = tl.exp(so_far + tl.cumsum(decay, 0))
            tl.store(Factors + local, k_norms)
            tl.store(Factors + CHUNK + local, from_start * k_norms if FOLD_KEYS else from_start)
            tl.store(Factors + 2 * CHUNK + local, from_start * q_norms)

            tiled = tl.broadcast_to(solved[None, :, :], (CHUNK // SIDE, SIDE, CHUNK))
            inverse = tl.where((j // SIDE == block)[:, None], tl.reshape(tiled, (CHUNK, CHUNK)), inverse)
            to_here = tl.sum(tl.where((i == SIDE - 1)[:, None], until, 0.0), 0)
            so_far += tl.sum(decay, 0)
        kept = tl.exp(to_here)
        tl.store(Factors + 3 * CHUNK + j, kept * norms if FOLD_KEYS else kept)
        tl.store(Decays + place, tl.exp(so_far))
