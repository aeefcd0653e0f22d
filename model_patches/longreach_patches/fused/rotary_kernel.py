"""The Triton form of `rotary`."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.backends.triton.overlap import follow, let_follow, overlap_options
from torch import Tensor

from longreach_patches.families import Rotary
from longreach_patches.fused.norm import HeadNorms
from longreach_patches.fused.rotary import QueryGrowth

_HEADS = 8  # of a program


class ByHead(NamedTuple):
    """What is done to heads beside turning them: how many queries there are, and as in `rotary.rotate_and_write`."""

    heads: int
    norms: HeadNorms | None
    norms_last: bool
    growth: QueryGrowth | None


@triton.jit
def _normed(x1, x2, QNorm, KNorm, first, second, fits, is_query, is_value, epsilon, DIM, PLUS_ONE: tl.constexpr):
    """Heads in two halves, queries and keys of them normalised; `first` and `second` are the channels of the halves."""
    mean = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DIM
    factor = tl.where(is_value, 1.0, tl.rsqrt(mean + epsilon)[:, None])
    q1 = tl.load(QNorm + first, mask=fits, other=0.0).to(tl.float32)[None, :]
    q2 = tl.load(QNorm + second, mask=fits, other=0.0).to(tl.float32)[None, :]
    k1 = tl.load(KNorm + first, mask=fits, other=0.0).to(tl.float32)[None, :]
    k2 = tl.load(KNorm + second, mask=fits, other=0.0).to(tl.float32)[None, :]
    if PLUS_ONE:
        q1 += 1.0
        q2 += 1.0
        k1 += 1.0
        k2 += 1.0
    x1 *= factor * tl.where(is_query, q1, tl.where(is_value, 1.0, k1))
    x2 *= factor * tl.where(is_query, q2, tl.where(is_value, 1.0, k2))
    return x1, x2


# Both are parts of one copy to the device, which begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["Slots", "Positions"])
def _rotate_kernel(
    QKV,
    Cos,
    Sin,
    Slots,
    QNorm,
    KNorm,
    Positions,
    KScale,
    VScale,
    Q,
    KPages,
    VPages,
    epsilon,
    beta,
    original,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    DOUBLED: tl.constexpr,
    SINGLE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    KV_SCALES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (T, blocks of heads): BLOCK heads of one token, each as two halves of its channels: those of a place in the
    halves are turned together. ROTARY_DIM is 0 where nothing is turned."""
    let_follow(OVERLAP)
    follow(OVERLAP)
    HALF: tl.constexpr = HEAD_DIM // 2
    TURNED: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = tl.arange(0, HALF_BLOCK)
    fits = places < HALF
    first, second = places, places + HALF
    if PAIRS:
        first, second = 2 * places, 2 * places + 1
    elif ROTARY_DIM > 0 and ROTARY_DIM < HEAD_DIM:  # what is not turned lies behind what is
        first = tl.where(places < TURNED, places, places + TURNED)
        second = tl.where(places < TURNED, places + TURNED, places + HALF)
    inside = (heads[:, None] < HEADS + 2 * KV_HEADS) & fits[None, :]
    offs1 = heads[:, None] * HEAD_DIM + first[None, :]
    offs2 = heads[:, None] * HEAD_DIM + second[None, :]
    row = QKV + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    x1 = tl.load(row + offs1, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(row + offs2, mask=inside, other=0.0).to(tl.float32)
    is_query = heads[:, None] < HEADS
    is_value = heads[:, None] >= HEADS + KV_HEADS
    if NORM and not NORM_LAST:
        x1, x2 = _normed(x1, x2, QNorm, KNorm, first, second, fits, is_query, is_value, epsilon, HEAD_DIM, PLUS_ONE)
    if ROTARY_DIM > 0:  # a row of cosines and sines has each of them twice, if not SINGLE
        WAVES: tl.constexpr = TURNED if SINGLE else ROTARY_DIM
        waves = 2 * places if DOUBLED else places
        turns = places < TURNED
        cos = tl.load(Cos + token * WAVES + waves, mask=turns, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(Sin + token * WAVES + waves, mask=turns, other=0.0).to(tl.float32)[None, :]
        rotated1 = x1 * cos - x2 * sin
        rotated2 = x2 * cos + x1 * sin
        x1 = tl.where(is_value, x1, rotated1)
        x2 = tl.where(is_value, x2, rotated2)
    if NORM and NORM_LAST:
        x1, x2 = _normed(x1, x2, QNorm, KNorm, first, second, fits, is_query, is_value, epsilon, HEAD_DIM, PLUS_ONE)
    if Positions is not None:
        past = tl.load(Positions + token) // original
        growth = tl.where(is_query, 1.0 + beta * tl.log(1.0 + past.to(tl.float32)), 1.0)
        x1 *= growth
        x2 *= growth
    q = Q + token * (HEADS * HEAD_DIM)
    tl.store(q + offs1, x1.to(Q.dtype.element_ty), mask=inside & is_query)
    tl.store(q + offs2, x2.to(Q.dtype.element_ty), mask=inside & is_query)

    slot = tl.load(Slots + token)
    writes = inside & (heads[:, None] >= HEADS) & (slot >= 0)
    # Rounded to the model's dtype first, as what is not written at once would be.
    x1 = x1.to(Q.dtype.element_ty)
    x2 = x2.to(Q.dtype.element_ty)
    if KV_SCALES:  # 448 is the largest number of e4m3; div_rn rounds as torch does
        key_head = heads - HEADS
        value_head = key_head - KV_HEADS
        k_scale = tl.load(KScale + key_head, mask=(key_head >= 0) & (key_head < KV_HEADS), other=1.0)
        v_scale = tl.load(VScale + value_head, mask=(value_head >= 0) & (value_head < KV_HEADS), other=1.0)
        scale = tl.broadcast_to((k_scale * v_scale)[:, None], (BLOCK, HALF_BLOCK))  # one of the two is 1
        x1 = tl.minimum(tl.maximum(tl.div_rn(x1.to(tl.float32), scale), -448.0), 448.0)
        x2 = tl.minimum(tl.maximum(tl.div_rn(x2.to(tl.float32), scale), -448.0), 448.0)
    k_page = KPages + slot * (KV_HEADS * HEAD_DIM) - HEADS * HEAD_DIM
    v_page = VPages + slot * (KV_HEADS * HEAD_DIM) - (HEADS + KV_HEADS) * HEAD_DIM
    page_type = KPages.dtype.element_ty
    tl.store(k_page + offs1, x1.to(page_type), mask=writes & (heads[:, None] < HEADS + KV_HEADS))
    tl.store(k_page + offs2, x2.to(page_type), mask=writes & (heads[:, None] < HEADS + KV_HEADS))
    tl.store(v_page + offs1, x1.to(page_type), mask=writes & is_value)
    tl.store(v_page + offs2, x2.to(page_type), mask=writes & is_value)


def rotate_and_write(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    by_head: ByHead,
    rotary: Rotary,
    kv_scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """As `rotary.rotate_and_write`."""
    heads, norms, norms_last, growth = by_head
    kv_heads, head_dim = k_pages.shape[2:]
    tokens = qkv.shape[0]
    q = qkv.new_empty(tokens, heads, head_dim)
    if tokens:
        launch(
            _rotate_kernel,
            (tokens, cdiv(heads + 2 * kv_heads, _HEADS)),
            qkv,
            *(rope or (None, None)),
            slots,
            *((norms.query, norms.key) if norms else (None, None)),
            None if growth is None else growth.positions,
            *(kv_scales or (None, None)),
            q,
            k_pages,
            v_pages,
            norms.epsilon if norms else 0.0,
            0.0 if growth is None else growth.beta,
            1 if growth is None else growth.original,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            BLOCK=_HEADS,
            ROTARY_DIM=rotary.channels(rope[0].shape[-1]) if rope else 0,
            PAIRS=rotary.pairs and rope is not None,
            DOUBLED=rotary.doubled,
            SINGLE=rotary.single,
            NORM=norms is not None,
            NORM_LAST=norms_last,
            PLUS_ONE=norms is not None and norms.kind == "rms_plus_one",
            KV_SCALES=kv_scales is not None,
            **overlap_options(qkv.device),
        )
    return q
