"""Everything between the QKV product and attention, in one kernel.

Queries and keys are normalised where the family does that head by head (Qwen3), and rotated (RoPE, Su et al. 2021),
whole or in their first channels; keys and values go to their pages, in 8-bit floats if those hold such.
"""

from __future__ import annotations

import torch
from longreach_kernels import write_pages
from torch import Tensor

from longreach_patches.families import Rotary
from longreach_patches.fused.dispatch import uses_triton
from longreach_patches.fused.norm import HeadNorms, Norm, eager_norm

_HALVES = Rotary()


def rotate_and_write(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    heads: int,
    rotary: Rotary = _HALVES,
    norms: HeadNorms | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Queries (T, Hq, D), ready for attention, of `qkv` (T, (Hq + 2 Hkv) D), contiguous; keys and values go to pages.

    Args:
        rope: cosines and sines (T, R) of the first R channels of each head, each for two of them, or (T, R / 2) if
            they are single; None where positions are not encoded.
        k_pages, v_pages, slots: as in `longreach_kernels.write_pages`.
        heads: Hq.
        rotary: which channels belong together, and how `rope` lies.
        norms: what each head of queries and of keys is normalised by first; RMSNorms.
        kv_scales: of keys and of values, as in `longreach_kernels.write_pages`, for fp8 pages.
        backend: as in `longreach_kernels.attention`; those that are not made of Triton kernels leave this to torch.
    """
    if uses_triton(qkv, backend):
        from longreach_patches.fused import rotary_kernel

        return rotary_kernel.rotate_and_write(qkv, rope, k_pages, v_pages, slots, heads, rotary, norms, kv_scales)
    kv_heads, head_dim = k_pages.shape[2:]
    q, k, v = qkv.view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    q = _prepared(q, norms and Norm(norms.query, norms.epsilon, norms.kind), rope, rotary)
    k = _prepared(k, norms and Norm(norms.key, norms.epsilon, norms.kind), rope, rotary)
    k_scale, v_scale = kv_scales or (None, None)
    write_pages(k, v, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale, backend=backend)
    return q


def _prepared(x: Tensor, norm: Norm | None, rope: tuple[Tensor, Tensor] | None, rotary: Rotary) -> Tensor:
    """Heads (T, H, D), normalised, with their first R channels turned by `rope`."""
    if norm is not None:
        x = eager_norm(x, norm)
    if rope is None:
        return x
    count = rotary.channels(rope[0].shape[-1])
    # One of each for the two channels that are turned together.
    cos, sin = (wave[:, None, ::2] if rotary.doubled else wave[:, None, : count // 2] for wave in rope)
    out = torch.empty_like(x)
    if rotary.pairs:
        x1, x2, out1, out2 = x[..., :count:2], x[..., 1:count:2], out[..., :count:2], out[..., 1:count:2]
    else:
        half = count // 2
        x1, x2, out1, out2 = x[..., :half], x[..., half:count], out[..., :half], out[..., half:count]
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin)
    out[..., count:] = x[..., count:]
    return out
