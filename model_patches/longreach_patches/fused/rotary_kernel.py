"""The Triton form of `rotary`."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import cdiv, launch
from torch import Tensor

from longreach_patches.fused.rotary import HeadNorms

_HEADS = 8  # of a program


@triton.jit
def _rotate_kernel(
    QKV,
    Cos,
    Sin,
    Slots,
    QNorm,
    KNorm,
    KScale,
    VScale,
    Q,
    KPages,
    VPages,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    KV_SCALES: tl.constexpr,
):
    """Grid (T, blocks of heads): BLOCK heads of one token, each as two halves of its channels."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, HALF_BLOCK)
    fits = channels < HALF
    inside = (heads[:, None] < HEADS + 2 * KV_HEADS) & fits[None, :]
    offs = heads[:, None] * HEAD_DIM + channels[None, :]
    row = QKV + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    x1 = tl.load(row + offs, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(row + offs + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query = heads[:, None] < HEADS
    is_value = heads[:, None] >= HEADS + KV_HEADS
    if NORM:
        mean = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / HEAD_DIM
        factor = tl.where(is_value, 1.0, tl.rsqrt(mean + epsilon)[:, None])
        q1 = tl.load(QNorm + channels, mask=fits, other=0.0).to(tl.float32)[None, :]
        q2 = tl.load(QNorm + channels + HALF, mask=fits, other=0.0).to(tl.float32)[None, :]
        k1 = tl.load(KNorm + channels, mask=fits, other=0.0).to(tl.float32)[None, :]
        k2 = tl.load(KNorm + channels + HALF, mask=fits, other=0.0).to(tl.float32)[None, :]
        x1 *= factor * tl.where(is_query, q1, tl.where(is_value, 1.0, k1))
        x2 *= factor * tl.where(is_query, q2, tl.where(is_value, 1.0, k2))
    if ROPE:  # the second half of a row of cosines and sines repeats the first
        cos = tl.load(Cos + token * HEAD_DIM + channels, mask=fits, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(Sin + token * HEAD_DIM + channels, mask=fits, other=0.0).to(tl.float32)[None, :]
        rotated1 = x1 * cos - x2 * sin
        rotated2 = x2 * cos + x1 * sin
        x1 = tl.where(is_value, x1, rotated1)
        x2 = tl.where(is_value, x2, rotated2)
    q = Q + token * (HEADS * HEAD_DIM)
    tl.store(q + offs, x1.to(Q.dtype.element_ty), mask=inside & is_query)
    tl.store(q + offs + HALF, x2.to(Q.dtype.element_ty), mask=inside & is_query)

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
    place = slot * (KV_HEADS * HEAD_DIM) + offs
    k_page = KPages + place - HEADS * HEAD_DIM
    v_page = VPages + place - (HEADS + KV_HEADS) * HEAD_DIM
    page_type = KPages.dtype.element_ty
    tl.store(k_page, x1.to(page_type), mask=writes & (heads[:, None] < HEADS + KV_HEADS))
    tl.store(k_page + HALF, x2.to(page_type), mask=writes & (heads[:, None] < HEADS + KV_HEADS))
    tl.store(v_page, x1.to(page_type), mask=writes & is_value)
    tl.store(v_page + HALF, x2.to(page_type), mask=writes & is_value)


def rotate_and_write(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    heads: int,
    norms: HeadNorms | None,
    kv_scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """As `rotary.rotate_and_write`."""
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
            *(kv_scales or (None, None)),
            q,
            k_pages,
            v_pages,
            norms.epsilon if norms else 0.0,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            BLOCK=_HEADS,
            ROPE=rope is not None,
            NORM=norms is not None,
            KV_SCALES=kv_scales is not None,
        )
    return q
