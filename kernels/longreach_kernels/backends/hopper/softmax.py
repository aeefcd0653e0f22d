"""The softmax of the Hopper kernels: one tile of products in registers at a time, between two matrix products.

All functions work on the rows of one warpgroup, in the layout of its products. The
assembler decides much of their cost, so what it made of them is tested (`tests/kernels/compile_hopper.py`).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# (the stubs describe host functions; device functions take and return other types)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def reciprocal(x):
    """1 / x to the last bit but one, in one instruction in place of a division's ten."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def row_sums(p):
    """Sums of p (64, BN) over the columns that one thread holds: (64, 4). What threads share is summed at the end."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def row_maxima(x):
    """Maxima of x (64, BN) by rows. Four columns at a time: one after another, each would wait for the one before."""
    ROWS: gl.constexpr = x.shape[0]
    pairs = gl.max(x.reshape([ROWS, x.shape[1] // 8, 4, 2]), 3)
    fours = gl.max(pairs.reshape([ROWS, 4, x.shape[1] // 32, 4]), 1)
    return gl.convert_layout(gl.max(gl.max(fours, 1), 1), gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def softmax_step(qk, row_max, row_sum, scale, softcap_log2, SOFTCAP: gl.constexpr, OFFSET: gl.constexpr):
    """One step of the online softmax in base 2 (Milakov and Gimelshein 2018): p, the old rows' factor, maximum, sum.

    The maximum is in log2 units. It stays as it is while it would grow by no more than 8: then p is at most 256, which
    is as exact, and what was summed before keeps its factor of 1. Where a row has seen nothing yet 0 stands for its
    maximum: no inf - inf.
    """
    if scale.type.is_block():
        wide = scale[:, None]
    else:
        wide = scale
    if SOFTCAP:
        # cap tanh(x) = cap (1 - 2 / (exp(2 x) + 1)), the factors 2 log2(e) / cap in the scale. Masked stays masked.
        capped = softcap_log2 * (1.0 - 2.0 * reciprocal(gl.exp2(qk * wide) + 1.0))
        qk = gl.where(qk == float("-inf"), float("-inf"), capped)
        tile_max = row_maxima(qk)
    else:
        tile_max = row_maxima(qk) * scale
    new_max = gl.where(tile_max - row_max > 8.0, tile_max - OFFSET, row_max)
    safe = gl.where(new_max == float("-inf"), 0.0, new_max)
    if SOFTCAP:
        p = gl.exp2(qk - safe[:, None])
    else:
        p = gl.exp2(qk * wide - safe[:, None])
    alpha = gl.exp2(row_max - safe)
    lanes: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    factors = gl.convert_layout(alpha, lanes, assert_trivial=True)[:, None]
    return p, alpha, new_max, row_sum * factors + row_sums(p)


@gluon.constexpr_function
def _rescale_asm(count):
    """$0... are the results and, as operands $count..., what is multiplied; $2 count... are the factors."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        "{ .reg .pred first, second; "
        f"setp.neu.f32 first, ${2 * count}, 0f3F800000; setp.neu.f32 second, ${3 * count - 1}, 0f3F800000; "
        f"or.pred first, first, second; @!first bra KEEP; {products} KEEP: }}"
    )


@gluon.constexpr_function
def _rescale_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale(acc, factors, WARPS: gl.constexpr = 4):
    """acc (..., D), in the layout of a product, times factors (..., 1), skipped by a warp whose rows all have a factor
    of 1: nearly always."""
    count: gl.constexpr = acc.numel // (32 * WARPS)  # of a thread, which holds two rows
    factors, acc = gl.broadcast(factors, acc)
    return gl.inline_asm_elementwise(
        _rescale_asm(count), _rescale_constraints(count), [acc, factors], dtype=gl.float32, is_pure=True, pack=count
    )
