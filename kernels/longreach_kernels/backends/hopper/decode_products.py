"""Tiles of keys and values of the Hopper decode kernel as operands of its products.

Pages of 8-bit floats are converted to fp16 in registers. There the tensor cores want two keys' numbers of one channel
side by side, where pages hold two channels' numbers of one key: a thread reads 16 channels of each of its keys as
words, and the instructions that pair two keys' bytes do the transpose.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from longreach_kernels.backends.hopper.decode_layouts import shared_view, words_layout

ROWS = gl.constexpr(16)  # of queries in a product

# Of four channels of two keys, e4m3: for each channel the fp16 numbers of both keys.
PAIR_KEYS = gl.constexpr(
    "{ .reg .b32 low, high; .reg .b16 first, second; prmt.b32 low, $4, $5, 0x5140; prmt.b32 high, $4, $5, 0x7362; "
    "mov.b32 {first, second}, low; cvt.rn.f16x2.e4m3x2 $0, first; cvt.rn.f16x2.e4m3x2 $1, second; "
    "mov.b32 {first, second}, high; cvt.rn.f16x2.e4m3x2 $2, first; cvt.rn.f16x2.e4m3x2 $3, second; }"
)
FOUR_WORDS = gl.constexpr((gl.int32, gl.int32, gl.int32, gl.int32))


@gluon.jit
def scores(q_operand, tile, S: gl.constexpr):
    """Q K^T of a key tile (slices, D, keys), in the layout S."""
    SLICES: gl.constexpr = tile.shape[0]
    KEYS: gl.constexpr = tile.shape[2]
    K_OPERAND: gl.constexpr = gl.DotOperandLayout(1, S, q_operand.type.layout.k_width)
    return mma_v2(q_operand, tile.load(K_OPERAND).to(q_operand.dtype), gl.zeros([SLICES, ROWS, KEYS], gl.float32, S))


@gluon.jit
def _zero_beyond(x, keys_left):
    """x (slices, keys, columns), a tile, with zeros from key `keys_left` of the tile on."""
    LAYOUT: gl.constexpr = x.type.layout
    part = gl.arange(0, x.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    key = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]
    return gl.where(part * x.shape[1] + key < keys_left, x, gl.zeros_like(x))


@gluon.jit
def values(
    stage,
    v_s,
    keys_left,
    BN: gl.constexpr,
    BOX: gl.constexpr,
    V_OPERAND: gl.constexpr,
    D_WARPS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """The value tile (slices, keys, D) of a stage as operand of P V. If `MASKED`, zeros stand for what lies behind the
    last key, which may be NaN. Of 8-bit values the channels come in another order, which `decode._store_sum` undoes."""
    D: gl.constexpr = v_s.shape[2]
    SLICES: gl.constexpr = V_OPERAND.parent.warps_per_cta[0]
    KEYS: gl.constexpr = BN // SLICES
    if v_s.dtype == gl.float8e4nv:
        VIEW: gl.constexpr = shared_view(32, D // 4, BN, BOX, SLICES, False)
        words = v_s.index(stage)._reinterpret(gl.int32, [SLICES, KEYS, D // 4], VIEW)
        words = words.load(words_layout(D, KEYS, SLICES, D_WARPS))
        if MASKED:
            words = _zero_beyond(words, keys_left)
        even, odd = gl.split(words.reshape([SLICES, KEYS // 2, 2, D // 4]).permute([0, 1, 3, 2]))
        pairs = gl.inline_asm_elementwise(
            PAIR_KEYS, "=r,=r,=r,=r,r,r", [even, odd], dtype=FOUR_WORDS, is_pure=True, pack=1
        )
        pairs = gl.join(gl.join(pairs[0], pairs[1]), gl.join(pairs[2], pairs[3])).permute([0, 1, 2, 4, 3])
        pairs = pairs.reshape([SLICES, KEYS // 2, D])
        first = (pairs & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True)
        second = (pairs >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        v = gl.join(first, second).permute([0, 1, 3, 2]).reshape([SLICES, KEYS, 8, D_WARPS, D // 8 // D_WARPS])
        v = gl.convert_layout(v.permute([0, 1, 4, 3, 2]).reshape([SLICES, KEYS, D]), V_OPERAND, assert_trivial=True)
    else:
        VIEW: gl.constexpr = shared_view(v_s.dtype.primitive_bitwidth, D, BN, BOX, SLICES, False)
        v = v_s.index(stage)._reinterpret(v_s.dtype, [SLICES, KEYS, D], VIEW).load(V_OPERAND)
        if MASKED:
            v = _zero_beyond(v, keys_left)
    return v
