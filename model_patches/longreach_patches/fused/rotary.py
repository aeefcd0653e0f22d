"""Everything between the QKV product and attention, in one kernel.

Queries and keys are normalised where the family does that (Qwen3), and rotated (RoPE, Su et al. 2021); keys and values
go to their pages, in 8-bit floats if those hold such.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from longreach_kernels import write_pages
from torch import Tensor

from longreach_patches.fused.dispatch import uses_triton


class HeadNorms(NamedTuple):
    """The weights (D,) of the RMSNorms over each head of queries and of keys, and their epsilon."""

    query: Tensor
    key: Tensor
    epsilon: float


def rotate_and_write(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    heads: int,
    norms: HeadNorms | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Queries (T, Hq, D), ready for attention, of `qkv` (T, (Hq + 2 Hkv) D), contiguous; keys and values go to pages.

    Args:
        rope: cosines and sines (T, D), the halves of a row alike, or None where positions are not encoded.
        k_pages, v_pages, slots: as in `longreach_kernels.write_pages`.
        heads: Hq.
        norms: what queries and keys are normalised by first.
        kv_scales: of keys and of values, as in `longreach_kernels.write_pages`, for fp8 pages.
        backend: as in `longreach_kernels.attention`; those that are not made of Triton kernels leave this to torch.
    """
    if uses_triton(qkv, backend):
        from longreach_patches.fused import rotary_kernel

        return rotary_kernel.rotate_and_write(qkv, rope, k_pages, v_pages, slots, heads, norms, kv_scales)
    return _eager(qkv, rope, k_pages, v_pages, slots, heads, norms, kv_scales, backend)


def _eager(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    heads: int,
    norms: HeadNorms | None,
    kv_scales: tuple[Tensor, Tensor] | None,
    backend: str,
) -> Tensor:
    kv_heads, head_dim = k_pages.shape[2:]
    q, k, v = qkv.view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    q = _prepared(q, norms and norms.query, norms and norms.epsilon, rope)
    k = _prepared(k, norms and norms.key, norms and norms.epsilon, rope)
    k_scale, v_scale = kv_scales or (None, None)
    write_pages(k, v, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale, backend=backend)
    return q


def _prepared(x: Tensor, norm: Tensor | None, epsilon: float | None, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    if norm is not None:
        x = torch.nn.functional.rms_norm(x, norm.shape, norm, epsilon)
    if rope is None:
        return x
    half = x.shape[-1] // 2
    cos, sin = (wave[:, None] for wave in rope)
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out
