"""The forward kernel for Hopper (sm_90), in Gluon: persistent, warp-specialised, fed by the tensor memory accelerator.

FlashAttention-3 (Shah et al. 2024), section 3.1 and 3.2: a producer warp streams tiles of K and V through rings in
shared memory; each consumer warpgroup owns 64 queries and runs the product Q K^T of one tile beside P V of the tile
before it, with the softmax between them. Dense, sliding-window and block-sparse attention share one loop over the key
tiles of a work item (`work_items`); only tiles that a mask cuts are masked. A program takes several items, and brings
the tiles of the next one while its consumers still finish the last
(docs/dev/kernel-log.md#hopper-forward says what each of this is worth).

Every tensor is seen as (heads, rows, D), so that one kernel serves dense, ragged and paged batches, and a box of the
accelerator that reaches beyond a tensor's end or its head dim reads zeros. In a ragged batch it may reach into the next
sequence: those keys are masked, and their values set to zero, for 0 times NaN is NaN.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from longreach_kernels.backends.hopper.forward_arguments import Batch, Lists, Logits, Output, Pages, Sizes, Split
from longreach_kernels.backends.hopper.forward_consumer import consume
from longreach_kernels.backends.hopper.forward_producer import Buffers, Queries, Tiles, Turns, barriers, produce
from longreach_kernels.backends.hopper.forward_products import ROWS


@gluon.jit(
    do_not_specialize=[
        *("stride_lh", "stride_lt", "stride_ls", "stride_oh", "stride_ot", "stride_os", "head_dim"),
        *("stride_table", "tiles_of_seq"),
        *Sizes._fields,
        "sharing",
        *Split._fields,
    ],
    # A step's sequences behind its decodes begin anywhere in these; each alignment would be compiled anew.
    do_not_specialize_on_alignment=["cu_q", "cu_k", "context_lens", "table"],
)
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out,
    lse,
    counter,
    stride_lh,
    stride_lt,
    stride_oh,
    stride_ot,
    head_dim,
    cu_q,
    cu_k,
    context_lens,
    table,
    stride_table,
    num_seqs,
    num_queries,
    num_keys,
    heads,
    section,
    num_items,
    window,
    sinks,
    first_row,
    start,
    partial,
    tiles,
    order,
    sharing,
    bits,
    bit_index,
    sink_logits,
    scale_log2,
    softcap_log2,
    k_scale,
    v_scale,
    tiles_of_seq,
    num_splits,
    least_tiles,
    whole_tiles,
    stride_ls,
    stride_os,
    FORM: gl.constexpr,
):
    """Grid: any number of programs up to `num_items`; they share `counter`, which is 0 at first.

    See `forward_arguments` for the groups. Of splits `o_desc` is not used.
    """
    CONSUMERS: gl.constexpr = FORM.consumers
    RING: gl.constexpr = FORM.ring
    BN: gl.constexpr = FORM.block_n
    D: gl.constexpr = FORM.head_dim
    V_TILE: gl.constexpr = v_desc.block_type.shape
    output = Output(out, lse, stride_lh, stride_lt, stride_ls, stride_oh, stride_ot, stride_os, head_dim)
    batch = Batch(
        Pages(cu_q, cu_k, context_lens, table, stride_table, tiles_of_seq),
        Sizes(num_seqs, num_queries, num_keys, heads, section, num_items, window, sinks),
        Lists(first_row, start, partial, tiles, order, sharing, bits, bit_index),
        Split(num_splits, least_tiles, whole_tiles),
        Logits(scale_log2, softcap_log2, sink_logits, k_scale, v_scale),
    )
    q = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, ROWS, D], q_desc.layout)
    operand = q
    if k_desc.dtype == gl.float8e4nv:
        Q8: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, ROWS, D], gl.float8e4nv)
        operand = gl.allocate_shared_memory(gl.float8e4nv, [CONSUMERS, 1, ROWS, D], Q8)
    o = q
    if FORM.own_out:
        o = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [RING, 1, BN, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [RING, 1, V_TILE[1], V_TILE[2]], v_desc.layout)
    queries = Queries(q, operand, o, barriers(CONSUMERS, 1), barriers(CONSUMERS, 1))
    # fmt: off
    ring = Tiles(
        k, v, barriers(RING, 1), barriers(RING, CONSUMERS), barriers(RING, 1), barriers(RING, CONSUMERS))
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    buffers = Buffers(queries, ring, Turns(numbers, barriers(2, 1), barriers(2, CONSUMERS)))
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, o_desc, output, batch, buffers, FORM)),
            (consume, (1, o_desc, output, batch, buffers, FORM)),
            (produce, (q_desc, k_desc, v_desc, counter, batch, buffers, FORM)),
        ], [4, 1], [FORM.registers, FORM.producer_registers])
    else:
        gl.warp_specialize([
            (consume, (0, o_desc, output, batch, buffers, FORM)),
            (consume, (1, o_desc, output, batch, buffers, FORM)),
            (consume, (2, o_desc, output, batch, buffers, FORM)),
            (produce, (q_desc, k_desc, v_desc, counter, batch, buffers, FORM)),
        ], [4, 4, 1], [FORM.registers, FORM.registers, FORM.producer_registers])
    # fmt: on
