"""One token of the gated delta rule in Triton: the state is read once and written once."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["CuQ", "Read", "Write"])
def decode_kernel(
    Q,
    K,
    V,
    LogDecay,
    Beta,
    States,
    Out,
    CuQ,
    Read,
    Write,
    scale,
    epsilon,
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
    NORMALISE: tl.constexpr,
):
    """Grid (blocks of Dv, Hv, sequences). With S before the decay, ``out = scale * (decay S^T q + (q k) change)``, so
    that both products with S are made of one reading."""
    head = tl.program_id(1)
    seq = tl.program_id(2)
    row = tl.load(CuQ + seq).to(tl.int64)
    read = tl.load(Read + seq)
    write = tl.load(Write + seq)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_keys, in_values = keys < KEY_DIM, values < DIM
    inside = in_keys[:, None] & in_values[None, :]
    places = head * (KEY_DIM * DIM) + keys[:, None] * DIM + values[None, :]
    state = tl.load(States + read * stride_states + places, mask=inside & (read >= 0), other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    q = tl.load(Q + row * strides_q[0] + key_head * strides_q[1] + keys, mask=in_keys, other=0.0).to(tl.float32)
    k = tl.load(K + row * strides_k[0] + key_head * strides_k[1] + keys, mask=in_keys, other=0.0).to(tl.float32)
    v = tl.load(V + row * strides_v[0] + head * strides_v[1] + values, mask=in_values, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(LogDecay + row * HEADS + head))
    beta = tl.load(Beta + row * HEADS + head).to(tl.float32)
    if NORMALISE:
        q *= tl.rsqrt(tl.sum(q * q, 0) + epsilon)
        k *= tl.rsqrt(tl.sum(k * k, 0) + epsilon)
    change = beta * (v - decay * tl.sum(state * k[:, None], 0))
    out = scale * (decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * change)
    tl.store(Out + (row * HEADS + head) * DIM + values, out.to(Out.dtype.element_ty), mask=in_values)
    state = decay * state + k[:, None] * change[None, :]
    tl.store(States + write * stride_states + places, state, mask=inside & (write >= 0))
