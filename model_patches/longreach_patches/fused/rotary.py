"""Everything between the QKV product and attention, in one kernel.

Queries and keys are normalised where the family does that head by head (Qwen3; HunYuan does it last), and rotated
(RoPE, Su et al. 2021), whole or in their first channels; keys and values go to their pages, in 8-bit floats if those
hold such.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from longreach_kernels import write_pages
from torch import Tensor

from longreach_patches.families import Rotary
from longreach_patches.fused.dispatch import uses_triton
from longreach_patches.fused.norm import HeadNorms, Norm, eager_norm

_HALVES = Rotary()


class QueryGrowth(NamedTuple):
    """A factor of queries that grows with their positions: 1 + beta * log(1 + position // original) (Llama 4).

    Attributes:
        positions: (T,) int64.
        beta: how fast.
        original: positions, up to which it is 1.
    """

    positions: Tensor
    beta: float
    original: int

    def factors(self) -> Tensor:
        """(T,) fp32."""
        return 1 + self.beta * torch.log1p((self.positions // self.original).float())


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
    norms_last: bool = False,
    growth: QueryGrowth | None = None,
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
        norms: what each head of queries and of keys is normalised by, first or, with `norms_last`, turned; RMSNorms.
        growth: what queries are multiplied by at last.
        kv_scales: of keys and of values, as in `longreach_kernels.write_pages`, for fp8 pages.
        backend: as in `longreach_kernels.attention`; those that are not made of Triton kernels leave this to torch.
    """
    if uses_triton(qkv, backend):
        from longreach_patches.fused import rotary_kernel

        by_head = rotary_kernel.ByHead(heads, norms, norms_last, growth)
        return rotary_kernel.rotate_and_write(qkv, rope, k_pages, v_pages, slots, by_head, rotary, kv_scales)
    kv_heads, head_dim = k_pages.shape[2:]
    q, k, v = qkv.view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    q = _prepared(q, norms and Norm(norms.query, norms.epsilon, norms.kind), norms_last, rope, rotary)
    k = _prepared(k, norms and Norm(norms.key, norms.epsilon, norms.kind), norms_last, rope, rotary)
    if growth is not None:
        q = q * growth.factors()[:, None, None].to(q.dtype)
    k_scale, v_scale = kv_scales or (None, None)
    write_pages(k, v, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale, backend=backend)
    return q


def _prepared(
    x: Tensor, norm: Norm | None, norm_last: bool, rope: tuple[Tensor, Tensor] | None, rotary: Rotary
) -> Tensor:
    """Heads (T, H, D), normalised, with their first R channels turned by `rope`."""
    if norm is not None and not norm_last:
        x = eager_norm(x, norm)
    if rope is not None:
        x = _turned(x, rope, rotary)
    return eager_norm(x, norm) if norm is not None and norm_last else x


def _turned(x: Tensor, rope: tuple[Tensor, Tensor], rotary: Rotary) -> Tensor:
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
