"""The statistic of each query that both backward kernels need, in plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def delta_kernel(
    Out,
    GradOut,
    GradLse,
    Delta,
    o_strides,
    g_strides,
    l_strides,
    gl_strides,
    num_queries,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (row tiles, Hq, B): delta = rowsum(dO * O) - dL. GradLse None: dL is 0."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    seq = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < num_queries) & (offs_d[None, :] < HEAD_DIM)
    o_ptrs = Out + seq * o_strides[0] + head * o_strides[1] + rows[:, None] * o_strides[2] + offs_d[None, :]
    g_ptrs = GradOut + seq * g_strides[0] + head * g_strides[1] + rows[:, None] * g_strides[2] + offs_d[None, :]
    out = tl.load(o_ptrs, mask=inside, other=0.0)
    grad = tl.load(g_ptrs, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if GradLse is not None:
        place = GradLse + seq * gl_strides[0] + head * gl_strides[1] + rows * gl_strides[2]
        delta -= tl.load(place, mask=rows < num_queries, other=0.0)
    tl.store(Delta + seq * l_strides[0] + head * l_strides[1] + rows * l_strides[2], delta, mask=rows < num_queries)
