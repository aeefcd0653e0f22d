"""The write of new keys and values into their pages, one launch for both, capturable in a CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .config import launch


@triton.jit
def _write_kernel(
    K,
    V,
    KPages,
    VPages,
    Slots,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T,): one token's heads, WIDTH = Hkv * D channels."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(Slots + token)
    if slot < 0:
        return
    offs = tl.arange(0, BLOCK)
    inside = offs < WIDTH
    head = offs // HEAD_DIM
    channel = offs % HEAD_DIM
    k = tl.load(K + token * stride_kt + head * stride_kh + channel, mask=inside)
    v = tl.load(V + token * stride_vt + head * stride_vh + channel, mask=inside)
    tl.store(KPages + slot * WIDTH + offs, k.to(KPages.dtype.element_ty), mask=inside)
    tl.store(VPages + slot * WIDTH + offs, v.to(VPages.dtype.element_ty), mask=inside)


def write_pages(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write the rows of k and v (T, Hkv, D) to their slots; a slot of -1 is skipped."""
    tokens, heads, head_dim = k.shape
    if tokens == 0:
        return
    width = heads * head_dim
    launch(
        _write_kernel,
        (tokens,),
        k,
        v,
        k_pages,
        v_pages,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )
