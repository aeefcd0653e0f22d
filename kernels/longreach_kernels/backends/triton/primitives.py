"""Device functions that the kernels share: sequences, rows of tensors, the mask of a tile, the online softmax."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def find_sequence(CuQ, num_seqs, slot, BLOCK_M: tl.constexpr):
    """The sequence whose query tiles hold ``slot``, and its first slot.

    Sequence b owns the slots from ``(cu[b] - cu[0]) // BLOCK_M + b`` on: enough for its tiles, and known without a
    table. Slots beyond a sequence's last tile have nothing to do.
    """
    origin = tl.load(CuQ)
    low = 0
    high = num_seqs
    while high - low > 1:  # the last sequence whose first slot is not beyond ours
        middle = (low + high) // 2
        if (tl.load(CuQ + middle) - origin) // BLOCK_M + middle <= slot:
            low = middle
        else:
            high = middle
    return low, (tl.load(CuQ + low) - origin) // BLOCK_M + low


@triton.jit
def tile_pointers(base, Table, tile, offs_n, offs_d, num_keys, strides, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Pointers (BLOCK_N, BLOCK_D) of a key tile; ``strides`` are of (page, head, row). PAGE_SIZE 0: rows are contiguous
    from ``base``."""
    start = tile * BLOCK_N
    if PAGE_SIZE == 0:
        row0 = base + start.to(tl.int64) * strides[2]
        pointers = row0 + offs_n[:, None] * strides[2] + offs_d[None, :]
    elif PAGE_SIZE % BLOCK_N == 0:  # the tile lies inside one page
        page = tl.load(Table + start // PAGE_SIZE).to(tl.int64)
        row0 = base + page * strides[0] + (start % PAGE_SIZE) * strides[2]
        pointers = row0 + offs_n[:, None] * strides[2] + offs_d[None, :]
    else:
        keys = start + offs_n
        page = tl.load(Table + keys // PAGE_SIZE, mask=keys < num_keys, other=0).to(tl.int64)
        rows = page * strides[0] + (keys % PAGE_SIZE) * strides[2]
        pointers = base + rows[:, None] + offs_d[None, :]
    return pointers


@triton.jit
def load_rows(
    pointers,
    rows,
    offs_d,
    limit,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Load rows of channels; rows from ``limit`` on (if CHECK) and channels beyond the head dim are 0."""
    if CHECK:
        inside = rows[:, None] < limit
        if HEAD_DIM != BLOCK_D:
            inside = inside & (offs_d[None, :] < HEAD_DIM)
        x = tl.load(pointers, mask=inside, other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            x = tl.load(pointers)
        else:
            x = tl.load(pointers, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    return x


@triton.jit
def band_allows(q_positions, keys, num_keys, window, sinks, FORM: tl.constexpr):
    """`longreach_kernels.masks.mask.Band` for a tile, and the end of the keys; positions and keys broadcast."""
    allowed = keys < num_keys
    if FORM.causal:
        allowed = allowed & (keys <= q_positions)
    if FORM.windowed:
        allowed = allowed & ((keys > q_positions - window) | (keys < sinks))
    return allowed


@triton.jit
def bits_allow(Bits, index, rows, columns, FORM: tl.constexpr):
    """A bit tile of `TileLists` as a bool tile; ``rows`` and ``columns`` broadcast, in either order."""
    words: tl.constexpr = FORM.block_n // 32
    place = Bits + index.to(tl.int64) * (FORM.block_m * words) + rows * words
    # A word a row, not one a pair: a load of the whole tile would take the registers' layout away from the product.
    word = tl.load(place)
    for i in tl.static_range(1, words):
        word = tl.where(columns // 32 == i, tl.load(place + i), word)
    return ((word >> (columns % 32)) & 1) != 0


@triton.jit
def logits_log2(qk, scale_log2, softcap_log2, SOFTCAP: tl.constexpr):
    """Logits in log2 units. With a softcap, ``scale_log2`` is ``2 log2(e) scale / cap``, and
    ``cap tanh(x) = cap (1 - 2 / (exp(2x) + 1))``."""
    if SOFTCAP:
        logits = softcap_log2 * (1.0 - 2.0 / (tl.exp2(qk * scale_log2) + 1.0))
    else:
        logits = qk * scale_log2
    return logits


@triton.jit
def online_softmax(qk, row_max, row_sum, scale_log2, softcap_log2, SOFTCAP: tl.constexpr):
    """One step: weights of the tile, the factor of what was summed before, and the new maximum and sum (log2 units).

    Masked entries of ``qk`` are -inf. Where a row has seen nothing, 0 is subtracted in place of its maximum, -inf, to
    keep NaN out.
    """
    if SOFTCAP:
        # tanh of -inf is -1, not -inf: masked entries must be masked again after it.
        logits = tl.where(qk == float("-inf"), float("-inf"), logits_log2(qk, scale_log2, softcap_log2, True))
        max_new = tl.maximum(row_max, tl.max(logits, 1))
    else:
        # scale > 0, so the maximum is taken first and the scale folds into one multiply-add with the exponent.
        max_new = tl.maximum(row_max, tl.max(qk, 1) * scale_log2)
        logits = qk * scale_log2
    base = tl.where(max_new == float("-inf"), 0.0, max_new)
    p = tl.exp2(logits - base[:, None])
    alpha = tl.exp2(row_max - base)
    return p, alpha, max_new, row_sum * alpha + tl.sum(p, 1)
