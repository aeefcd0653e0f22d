"""Prompts from chunk to chunk, in Triton: the state stays in registers.

Heads of a group multiply the same C and B, each in a program of its own. To read their products, made beforehand, would
take as long as C and B take, whose reading from the L2 cache is what the kernel waits for.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.delta.solve_kernel import product


@triton.jit(do_not_specialize_on_alignment=["CuQ", "Read", "Write"])
def scan_kernel(
    X,
    B,
    C,
    Skip,
    States,
    Out,
    Factors,
    Decays,
    CuQ,
    Read,
    Write,
    strides_x,
    strides_b,
    strides_c,
    stride_states,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    STATE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (blocks of P, H, sequences). The arguments of chunks are those of `steps_kernel`.

    With S before a chunk: ``out = decays from the start * C S + Scores X + skip X``, and after it S is
    ``decay S + B^T (kept X)``. Scores are products of C and B, times sizes of steps, times decays between tokens.
    """
    head = tl.program_id(1)
    seq = tl.program_id(2)
    begin = tl.load(CuQ + seq)
    end = tl.load(CuQ + seq + 1)
    chunk = ((begin - tl.load(CuQ)) // CHUNK + seq).to(tl.int64)
    read = tl.load(Read + seq)
    write = tl.load(Write + seq)
    group = head // (HEADS // GROUPS)
    X += head * strides_x[1]
    B += group * strides_b[1]
    C += group * strides_c[1]
    Out += head * DIM
    dtype: tl.constexpr = X.dtype.element_ty
    i = tl.arange(0, CHUNK)
    seen = i[:, None] >= i[None, :]
    channels = tl.arange(0, BLOCK_N)
    values = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_channels, in_values = (channels < STATE)[None, :], (values < DIM)[None, :]
    in_state = (channels < STATE)[:, None] & in_values
    places = head * (STATE * DIM) + channels[:, None] * DIM + values[None, :]
    state = tl.load(States + read * stride_states + places, mask=in_state & (read >= 0), other=0.0)
    skip = 0.0
    if Skip is not None:
        skip = tl.load(Skip + head).to(tl.float32)
    for start in range(begin, end, CHUNK):
        rows = (start + i).to(tl.int64)
        inside = (start + i < end)[:, None]
        c = tl.load(C + rows[:, None] * strides_c[0] + channels[None, :], mask=inside & in_channels, other=0.0)
        b = tl.load(B + rows[:, None] * strides_b[0] + channels[None, :], mask=inside & in_channels, other=0.0)
        x = tl.load(X + rows[:, None] * strides_x[0] + values[None, :], mask=inside & in_values, other=0.0)
        place = chunk * HEADS + head
        factors = Factors + place * (4 * CHUNK) + i
        high = tl.load(factors)
        low = tl.load(factors + CHUNK)
        steps = tl.load(factors + 2 * CHUNK)
        kept = tl.load(factors + 3 * CHUNK)
        decay = tl.load(Decays + place)
        between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        weights = tl.exp(tl.where(seen, between, float("-inf"))) * steps[None, :]
        out = product(c, state.to(dtype)) * tl.exp(high)[:, None]
        out = product((product(c, tl.trans(b)) * weights).to(dtype), x, out)
        wide = x.to(tl.float32)
        out += skip * wide
        tl.store(
            Out + rows[:, None] * (HEADS * DIM) + values[None, :],
            out.to(Out.dtype.element_ty),
            mask=inside & in_values,
        )
        state = product(tl.trans(b), (wide * kept[:, None]).to(dtype), state * decay)
        chunk += 1
    tl.store(States + write * stride_states + places, state, mask=in_state & (write >= 0))
