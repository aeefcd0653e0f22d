"""Sizes of steps of Mamba-2 and the decays over them, in Triton: of the chunks of prompts, all side by side."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.backends.triton.primitives import find_sequence
from longreach_kernels.delta.gates_kernel import softplus

_LEAST: tl.constexpr = tl.constexpr(-1000.0)  # exp of anything below is 0 as well


@triton.jit
def step_and_decay(Dt, DtBias, DecayLog, head, inside, least, greatest):
    """Sizes of steps in fp32 from numbers at `Dt`, and what the state's decays over them are the exponentials of."""
    dt = tl.load(Dt, mask=inside, other=0.0).to(tl.float32)
    dt += tl.load(DtBias + head, mask=inside, other=0.0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(dt), least), greatest)
    return step, -tl.exp(tl.load(DecayLog + head, mask=inside, other=0.0).to(tl.float32)) * step


@triton.jit(do_not_specialize=["num_seqs", "least", "greatest"], do_not_specialize_on_alignment=["CuQ"])
def steps_kernel(
    Dt,
    DtBias,
    DecayLog,
    Factors,
    Decays,
    CuQ,
    num_seqs,
    least,
    greatest,
    strides_dt,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (chunks, blocks of H): for each chunk and head Factors (4, CHUNK) and Decays, a number, fp32.

    Factors are sums of logarithms of decays from the chunk's start, what fp32 has lost of these sums, sizes of steps,
    and these sizes with the decay up to the chunk's end. Sums are fp64: a difference of sums of fp32 has lost its
    digits where a strong decay lies before both.
    """
    chunk = tl.program_id(0)
    seq, first = find_sequence(CuQ, num_seqs, chunk, CHUNK)
    start = tl.load(CuQ + seq) + (chunk - first) * CHUNK
    end = tl.load(CuQ + seq + 1)
    if start < end:
        i = tl.arange(0, CHUNK)
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        known = heads < HEADS
        here = (start + i < end)[:, None] & known[None, :]
        numbers = Dt + (start + i).to(tl.int64)[:, None] * strides_dt[0] + heads[None, :] * strides_dt[1]
        head = tl.broadcast_to(heads[None, :], (CHUNK, BLOCK_H))
        step, decay = step_and_decay(numbers, DtBias, DecayLog, head, here, least, greatest)
        # Rows beyond a sequence's end add nothing and change nothing.
        step = tl.where(here, step, 0.0)
        decay = tl.where(here, tl.maximum(decay, _LEAST), 0.0).to(tl.float64)
        sums = tl.cumsum(decay, 0)
        total = tl.sum(decay, 0)
        high = sums.to(tl.float32)
        low = (sums - high.to(tl.float64)).to(tl.float32)
        kept = step * tl.exp((total[None, :] - sums).to(tl.float32))
        place = chunk.to(tl.int64) * HEADS + heads
        factors = Factors + place[None, :] * (4 * CHUNK) + i[:, None]
        tl.store(factors, high, mask=known[None, :])
        tl.store(factors + CHUNK, low, mask=known[None, :])
        tl.store(factors + 2 * CHUNK, step, mask=known[None, :])
        tl.store(factors + 3 * CHUNK, kept, mask=known[None, :])
        tl.store(Decays + place, tl.exp(total.to(tl.float32)), mask=known)
