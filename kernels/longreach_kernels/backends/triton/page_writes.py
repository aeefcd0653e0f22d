"""The write of new keys and values into their pages, one launch for both, capturable in a CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import launch


@triton.jit(do_not_specialize_on_alignment=["Slots"])
def _write_kernel(
    K,
    V,
    KPages,
    VPages,
    Slots,
    KScale,
    VScale,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_SCALES: tl.constexpr,
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
    if KV_SCALES:  # 448 is the largest number of e4m3; div_rn rounds as torch does, `/` is a little off on a GPU
        k_scale = tl.load(KScale + head, mask=inside, other=1.0)
        v_scale = tl.load(VScale + head, mask=inside, other=1.0)
        k = tl.minimum(tl.maximum(tl.div_rn(k.to(tl.float32), k_scale), -448.0), 448.0)
        v = tl.minimum(tl.maximum(tl.div_rn(v.to(tl.float32), v_scale), -448.0), 448.0)
    tl.store(KPages + slot * WIDTH + offs, k.to(KPages.dtype.element_ty), mask=inside)
    tl.store(VPages + slot * WIDTH + offs, v.to(VPages.dtype.element_ty), mask=inside)


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
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
        *(kv_scales or (None, None)),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        KV_SCALES=kv_scales is not None,
    )
