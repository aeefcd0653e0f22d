"""Prompts from chunk to chunk, in Triton: the state stays in registers, and what a chunk has in itself is read."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.delta.solve_kernel import product


@triton.jit(do_not_specialize_on_alignment=["CuQ", "Read", "Write"])
def scan_kernel(
    Q,
    K,
    V,
    States,
    Out,
    Inverse,
    Scores,
    Factors,
    Decays,
    CuQ,
    Read,
    Write,
    strides_q,
    strides_k,
    strides_v,
    stride_states,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    FOLD_KEYS: tl.constexpr,
):
    """Grid (blocks of Dv, Hv, sequences). The arguments of chunks are those of `solve_kernel`.

    With S before a chunk: ``changes = Inverse (V - known K S)`` and ``out = read Q S + Scores changes``, and after it S
    is ``decay S + K^T (kept changes)``.
    """
    head = tl.program_id(1)
    seq = tl.program_id(2)
    begin = tl.load(CuQ + seq)
    end = tl.load(CuQ + seq + 1)
    chunk = ((begin - tl.load(CuQ)) // CHUNK + seq).to(tl.int64)
    read = tl.load(Read + seq)
    write = tl.load(Write + seq)
    key_head = head // (HEADS // KEY_HEADS)
    Q += key_head * strides_q[1]
    K += key_head * strides_k[1]
    V += head * strides_v[1]
    Out += head * DIM
    dtype: tl.constexpr = K.dtype.element_ty
    i = tl.arange(0, CHUNK)
    square = i[:, None] * CHUNK + i[None, :]
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_keys, in_values = (keys < KEY_DIM)[None, :], (values < DIM)[None, :]
    in_state = (keys < KEY_DIM)[:, None] & in_values
    places = head * (KEY_DIM * DIM) + keys[:, None] * DIM + values[None, :]
    state = tl.load(States + read * stride_states + places, mask=in_state & (read >= 0), other=0.0)
    for start in range(begin, end, CHUNK):
        rows = (start + i).to(tl.int64)
        inside = (start + i < end)[:, None]
        place = chunk * HEADS + head
        k = tl.load(K + rows[:, None] * strides_k[0] + keys[None, :], mask=inside & in_keys, other=0.0)
        q = tl.load(Q + rows[:, None] * strides_q[0] + keys[None, :], mask=inside & in_keys, other=0.0)
        v = tl.load(V + rows[:, None] * strides_v[0] + values[None, :], mask=inside & in_values, other=0.0)
        inverse = tl.load(Inverse + place * (CHUNK * CHUNK) + square)
        scores = tl.load(Scores + place * (CHUNK * CHUNK) + square)
        # What follows products is loaded before them, so that none waits for memory.
        factors = Factors + place * (4 * CHUNK) + i
        known = tl.load(factors + CHUNK)[:, None]
        from_state = tl.load(factors + 2 * CHUNK)[:, None]
        kept = tl.load(factors + 3 * CHUNK)[:, None]
        decay = tl.load(Decays + place)
        if not FOLD_KEYS:
            k = (k.to(tl.float32) * tl.load(factors)[:, None]).to(dtype)
        low = state.to(dtype)
        unknown = v.to(tl.float32) - product(k, low) * known
        out = product(q, low) * from_state
        changes = product(inverse, unknown.to(dtype))
        out = product(scores, changes.to(dtype), out)
        tl.store(
            Out + rows[:, None] * (HEADS * DIM) + values[None, :],
            out.to(Out.dtype.element_ty),
            mask=inside & in_values,
        )
        state = product(tl.trans(k), (changes * kept).to(dtype), state * decay)
        chunk += 1
    tl.store(States + write * stride_states + places, state, mask=in_state & (write >= 0))
