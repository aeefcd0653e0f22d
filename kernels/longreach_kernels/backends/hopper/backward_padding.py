# pyright: reportGeneralTypeIssues=false
"""Before and after the Hopper backward kernel, in plain Triton: its statistics of the rows, and dQ from its sums.

Both live in padded buffers, in which every sequence begins at a query tile: of tile t of query head h, statistics are
the rows 2 (h T + t) (the log-sum-exp in log2 units) and 2 (h T + t) + 1 (delta), the sum is the BLOCK_M HEAD_DIM = 8192
numbers from (h T + t) 8192 on, where T is the number of tiles of a head. So the tensor memory accelerator moves whole
tiles. A sum lies in the order in which the registers of the kernel's two consumers hold it, half after half
(`backward_consumer.PART`). In a half, of 64 rows and 64 columns, the bits of a number's place say, the highest first:
its column over 8 (three bits), its row over 16 (two), its row modulo 8 (three), its column modulo 8 over 2 (two), its
row modulo 16 over 8, its column modulo 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach_kernels.backends.triton.primitives import LOG2E, find_sequence


@triton.jit
def _place(CuQ, num_seqs, num_queries, BLOCK_M: tl.constexpr, RAGGED: tl.constexpr):
    """Where the tile `program_id(0)` of a head begins in the tensor, and how many rows from there on are queries."""
    tile = tl.program_id(0)
    start = 0
    if RAGGED:
        seq, first_slot = find_sequence(CuQ, num_seqs, tile, BLOCK_M)
        start = tl.load(CuQ + seq)
        num_queries = tl.load(CuQ + seq + 1) - start
        tile -= first_slot
    return start + tile * BLOCK_M, num_queries - tile * BLOCK_M


@triton.jit(do_not_specialize=["num_seqs", "num_heads", "num_queries"])
def statistics_kernel(
    Out,
    GradOut,
    Lse,
    GradLse,
    Delta,
    Statistics,
    CuQ,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_lb,
    stride_lh,
    stride_lt,
    stride_glb,
    stride_glh,
    stride_glt,
    num_seqs,
    num_heads,
    num_queries,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """Grid (tiles of a head, B Hq): delta = rowsum(dO * O) - dL, like Lse, and both statistics in their padded buffer.

    The log-sum-exp of a row that saw nothing, or of none, is +inf there, so that P is 0."""
    first_row, num_rows = _place(CuQ, num_seqs, num_queries, BLOCK_M, RAGGED)
    tile = tl.num_programs(0).to(tl.int64) * tl.program_id(1) + tl.program_id(0)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    rows = first_row.to(tl.int64) + offs_m
    inside = offs_m < num_rows
    o_place = Out + batch * stride_ob + head * stride_oh + rows[:, None] * stride_ot + offs_d[None, :]
    g_place = GradOut + batch * stride_gb + head * stride_gh + rows[:, None] * stride_gt + offs_d[None, :]
    out = tl.load(o_place, mask=inside[:, None], other=0.0)
    grad = tl.load(g_place, mask=inside[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    l_offset = batch * stride_lb + head * stride_lh + rows * stride_lt
    lse = tl.load(Lse + l_offset, mask=inside, other=float("-inf")) * LOG2E
    if HAS_GRAD_LSE:
        place = GradLse + batch * stride_glb + head * stride_glh + rows * stride_glt
        delta -= tl.load(place, mask=inside, other=0.0)
    tl.store(Delta + l_offset, delta, mask=inside)
    tl.store(Statistics + 2 * tile * BLOCK_M + offs_m, tl.where(lse == float("-inf"), float("inf"), lse))
    tl.store(Statistics + (2 * tile + 1) * BLOCK_M + offs_m, delta)


@triton.jit(do_not_specialize=["num_seqs", "num_heads", "num_queries"])
def grad_q_kernel(
    Sums,
    Counters,
    GradQ,
    CuQ,
    stride_b,
    stride_h,
    stride_t,
    num_seqs,
    num_heads,
    num_queries,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Grid (tiles of a head, B Hq): dQ = scale * its sum, 0 where no key tile has been added."""
    first_row, num_rows = _place(CuQ, num_seqs, num_queries, BLOCK_M, RAGGED)
    if num_rows <= 0:
        return
    tile = tl.num_programs(0).to(tl.int64) * tl.program_id(1) + tl.program_id(0)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    added = tl.load(Counters + tile) > 0
    flat = tl.load(Sums + tile * (BLOCK_M * HEAD_DIM) + tl.arange(0, BLOCK_M * HEAD_DIM), mask=added, other=0.0)
    parts = tl.reshape(flat, [2, 8, 4, 8, 4, 2, 2])
    if HEAD_DIM == 128:  # the halves lie side by side
        sums = tl.reshape(tl.permute(parts, (2, 5, 3, 0, 1, 4, 6)), [BLOCK_M, HEAD_DIM])
    else:  # one below the other
        sums = tl.reshape(tl.permute(parts, (0, 2, 5, 3, 1, 4, 6)), [BLOCK_M, HEAD_DIM])
    place = batch * stride_b + head * stride_h + (first_row.to(tl.int64) + offs_m)[:, None] * stride_t + offs_d[None, :]
    tl.store(GradQ + place, (sums * scale).to(GradQ.dtype.element_ty), mask=(offs_m < num_rows)[:, None])
