"""The matrix products of the Hopper forward kernel, Q K^T and P V of one tile of keys, of 16-bit or of 8-bit floats.

Products of 8-bit floats (e4m3) differ in four ways. Both operands of the tensor cores need the summed dimension
contiguous: values come transposed (`transpose`). Queries are rounded here, each divided by a scale of its own. The
registers of a result do not hold what the next product's left operand wants, columns 4 t to 4 t + 3, but of each 16
columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: P is multiplied as it lies, and the values' keys come in that order. And sums
keep 14 bits only, so P V of a tile is summed by itself and added in fp32.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from longreach_kernels.backends.hopper.decode_queue import barrier

ROWS = gl.constexpr(64)  # of queries, a consumer warpgroup: the M of one wgmma


@gluon.constexpr_function
def accumulator(columns, dtype):
    """Layout of a product (64, columns) of operands of `dtype` in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // dtype.primitive_bitwidth])


@gluon.jit
def quantize_queries(q_in, q, LAYOUT: gl.constexpr):
    """Write queries (64, D) to `q` as e4m3: each row's scale, in `LAYOUT`."""
    wide = q_in.load(accumulator(q_in.shape[1], q.dtype)).to(gl.float32)
    scale = gl.maximum(gl.max(gl.abs(wide), 1), 1e-30) * (1.0 / 448.0)
    q.store((wide * (1.0 / scale)[:, None]).to(q.dtype))
    fence_async_shared()
    barrier()
    return gl.convert_layout(scale, LAYOUT)


@gluon.jit
def issue_scores(q, k, BN: gl.constexpr, D: gl.constexpr):
    """Begin Q K^T: (64, BN), under way. k is the shared memory of a key tile."""
    zero = gl.zeros([ROWS, BN], gl.float32, accumulator(BN, k.dtype))
    return warpgroup_mma(q, k.reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def issue_sum(p, v, acc, BN: gl.constexpr, D: gl.constexpr):
    """Begin P V, of D channels of the values, with P as `pack` made it: the sum (64, D) under way, of 16-bit floats
    with `acc` in it, and what must stay in registers until it is done. v is the shared memory of a value tile."""
    L: gl.constexpr = accumulator(D, v.dtype)
    if v.dtype == gl.float8e4nv:
        kept = p
        values = v.reshape([D, BN]).permute((1, 0))
        zero = gl.zeros([ROWS, D], gl.float32, L)
        product = warpgroup_mma(_unpack8(p, gl.DotOperandLayout(0, L, 4)), values, zero, use_acc=False, is_async=True)
    else:
        kept = _unpack16(p, v.dtype, gl.DotOperandLayout(0, L, 2))
        product = warpgroup_mma(kept, v.reshape([BN, D]), acc, is_async=True)
    return product, kept


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """p (64, BN) as `dtype`, as many to a register as fit, int32: (64, BN / 2) or (64, BN / 4). As narrow numbers they
    would be taken apart and put together again wherever p goes from one loop into another."""
    return _pack8(p) if dtype == gl.float8e4nv else _pack16(p, dtype)


@gluon.jit
def _pack16(p, dtype: gl.constexpr):
    even, odd = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack16(packed, dtype: gl.constexpr, layout: gl.constexpr):
    even = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    p = gl.join(even, odd).reshape([packed.shape[0], packed.shape[1] * 2])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def _pack8(p):
    BN: gl.constexpr = p.shape[1]
    fours = p.reshape([ROWS, BN // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, BN // 4, 2, 2])
    even, odd = gl.split(fours)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    asm: gl.constexpr = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    numbers = [first, second, third, fourth]
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r", numbers, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack8(packed, layout: gl.constexpr):
    low = gl.join(_byte(packed, 0), _byte(packed, 1))
    high = gl.join(_byte(packed, 2), _byte(packed, 3))
    p = gl.join(low, high).permute((0, 1, 3, 2)).reshape([packed.shape[0], packed.shape[1] * 4])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def _byte(packed, i: gl.constexpr):
    return ((packed >> (8 * i)) & 0xFF).to(gl.int8).to(gl.float8e4nv, bitcast=True)
