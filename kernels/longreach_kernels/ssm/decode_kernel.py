"""One token of Mamba-2's recurrence in Triton: the state is read once and written once."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.ssm.steps_kernel import step_and_decay


@triton.jit(do_not_specialize=["least", "greatest"], do_not_specialize_on_alignment=["CuQ", "Read", "Write"])
def decode_kernel(
    X,
    B,
    C,
    Dt,
    DtBias,
    DecayLog,
    Skip,
    States,
    Out,
    CuQ,
    Read,
    Write,
    least,
    greatest,
    strides_x,
    strides_b,
    strides_c,
    strides_dt,
    stride_states,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    STATE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid (blocks of P, H, sequences)."""
    head = tl.program_id(1)
    seq = tl.program_id(2)
    row = tl.load(CuQ + seq).to(tl.int64)
    read = tl.load(Read + seq)
    write = tl.load(Write + seq)
    channels = tl.arange(0, BLOCK_N)
    values = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_channels, in_values = channels < STATE, values < DIM
    inside = in_channels[:, None] & in_values[None, :]
    places = head * (STATE * DIM) + channels[:, None] * DIM + values[None, :]
    state = tl.load(States + read * stride_states + places, mask=inside & (read >= 0), other=0.0)
    group = head // (HEADS // GROUPS)
    b = tl.load(B + row * strides_b[0] + group * strides_b[1] + channels, mask=in_channels, other=0.0).to(tl.float32)
    c = tl.load(C + row * strides_c[0] + group * strides_c[1] + channels, mask=in_channels, other=0.0).to(tl.float32)
    x = tl.load(X + row * strides_x[0] + head * strides_x[1] + values, mask=in_values, other=0.0).to(tl.float32)
    numbers = Dt + row * strides_dt[0] + head * strides_dt[1]
    step, decay = step_and_decay(numbers, DtBias, DecayLog, head, True, least, greatest)
    state = tl.exp(decay) * state + b[:, None] * (step * x)[None, :]
    out = tl.sum(state * c[:, None], 0)
    if Skip is not None:
        out += tl.load(Skip + head).to(tl.float32) * x
    tl.store(Out + (row * HEADS + head) * DIM + values, out.to(Out.dtype.element_ty), mask=in_values)
    tl.store(States + write * stride_states + places, state, mask=inside & (write >= 0))
