"""The merge of a sequence's splits, by the program of the Hopper decode kernel that finishes the last of them."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longreach_kernels.backends.hopper.decode_layouts import merge_layout

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def merge(output, base, count, row, kv_head, WARPS: gl.constexpr, FORM: gl.constexpr):
    """Merge `count` splits, whose results begin at `base`, in blocks of `merge_block`, ascending."""
    D: gl.constexpr = FORM.head_dim
    GROUP: gl.constexpr = FORM.group
    GROUP_BLOCK: gl.constexpr = FORM.group_block
    BLOCK: gl.constexpr = FORM.merge_block
    L: gl.constexpr = merge_layout(GROUP_BLOCK, D, WARPS)
    L2: gl.constexpr = gl.SliceLayout(2, L)
    O: gl.constexpr = gl.SliceLayout(0, L)  # noqa: E741
    R: gl.constexpr = gl.SliceLayout(0, L2)
    splits = gl.arange(0, BLOCK, gl.SliceLayout(1, L2))
    group = gl.arange(0, GROUP_BLOCK, R)
    row_max = gl.full([GROUP_BLOCK], float("-inf"), gl.float32, R)
    row_sum = gl.full([GROUP_BLOCK], 0.0, gl.float32, R)
    if FORM.sink_logits:
        logits = gl.load(output.sink_logits + kv_head * GROUP + group, mask=group < GROUP, other=0.0)
        row_max = logits.to(gl.float32) * LOG2E
        row_sum = row_sum + 1.0
    acc = gl.zeros([GROUP_BLOCK, D], gl.float32, O)
    rows = gl.arange(0, GROUP_BLOCK, gl.SliceLayout(1, O))
    columns = gl.arange(0, D, gl.SliceLayout(0, O))
    offsets = rows[:, None] * D + columns[None, :]
    for start in range(0, count, BLOCK):
        inside = (start + splits < count)[:, None] & (group < GROUP)[None, :]
        index = (start + splits)[:, None] * GROUP + group[None, :]
        # Other programs wrote these: past the first-level cache.
        split = gl.load(output.split_lse + base * GROUP + index, mask=inside, other=float("-inf"), cache_modifier=".cg")
        index = gl.convert_layout((start + splits) * (GROUP * D), gl.SliceLayout(1, gl.SliceLayout(2, L)))
        pointers = output.split_out + base * (GROUP * D) + index[:, None][:, :, None] + offsets[None, :, :]
        wide = gl.expand_dims(inside, 2) & gl.expand_dims(columns[None, :] >= 0, 0)
        x = gl.load(pointers, mask=wide, other=0.0, cache_modifier=".cg")
        new_max = gl.maximum(row_max, gl.max(split, 0))
        safe = gl.where(new_max == float("-inf"), 0.0, new_max)
        weights = gl.exp2(split - safe[None, :])
        alpha = gl.exp2(row_max - safe)
        row_sum = row_sum * alpha + gl.sum(weights, 0)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None] + gl.sum(x * weights[:, :, None], 0)
        row_max = new_max
    seen = row_sum > 0.0
    safe_sum = gl.where(seen, row_sum, 1.0)
    heads = kv_head * GROUP + group
    result = gl.where(seen, (row_max + gl.log2(safe_sum)) * LN2, float("-inf"))
    gl.store(output.lse + row.to(gl.int64) * output.stride_lt + heads * output.stride_lh, result, mask=group < GROUP)
    acc = acc / gl.convert_layout(safe_sum, gl.SliceLayout(1, O))[:, None]
    pointers = (
        output.out
        + row.to(gl.int64) * output.stride_ot
        + ((kv_head * GROUP + rows) * output.stride_oh)[:, None]
        + columns[None, :]
    )
    gl.store(pointers, acc.to(output.out.dtype.element_ty), mask=(rows < GROUP)[:, None] & (columns >= 0)[None, :])
