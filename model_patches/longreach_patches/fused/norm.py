"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), for steps that need no gradient: for few rows a
third of the time of torch's, and what is added to a residual stream is added in the same kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longreach_patches.families import NormKind
from longreach_patches.fused.dispatch import uses_triton


class Norm(NamedTuple):
    """A weight (C,), what is added to the mean of squares, and what is computed with them.

    A LayerNorm may have a bias (C,), or no weight.
    """

    weight: Tensor | None
    epsilon: float
    kind: NormKind = "rms"
    bias: Tensor | None = None

    @property
    def centred(self) -> bool:
        """Whether the mean is taken off."""
        return self.kind in ("layer", "layer_plus_one")


class HeadNorms(NamedTuple):
    """The weights of the RMSNorms of queries and of keys, and their epsilon: (D,) for each head of them, (Hq D,) and
    (Hkv D,) for all heads together."""

    query: Tensor
    key: Tensor
    epsilon: float
    kind: NormKind = "rms"


def normalize(
    x: Tensor, norm: Norm, backend: str = "auto", *, add_to: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """The norm of each row of x (T, C), contiguous. The kernel rounds once.

    With `add_to` (T, C) the norm times `scale` is added to that, in place, and that is returned.
    """
    if uses_triton(x, backend):
        from longreach_patches.fused import norm_kernel

        return norm_kernel.normalize(x, norm, add_to, scale)
    out = eager_norm(x, norm)
    return out if add_to is None else add_to.add_(out, alpha=scale)


def normalize_all_heads(qkv: Tensor, norms: HeadNorms, backend: str = "auto") -> None:
    """Normalise, in place, all queries of each row of `qkv` (T, (Hq + 2 Hkv) D), contiguous, and all its keys."""
    if uses_triton(qkv, backend):
        from longreach_patches.fused import norm_kernel

        norm_kernel.normalize_all_heads(qkv, norms)
        return
    queries = len(norms.query)
    q, k = qkv[:, :queries], qkv[:, queries : queries + len(norms.key)]
    q.copy_(eager_norm(q, Norm(norms.query, norms.epsilon, norms.kind)))
    k.copy_(eager_norm(k, Norm(norms.key, norms.epsilon, norms.kind)))


def eager_norm(x: Tensor, norm: Norm) -> Tensor:
    """The norm over the last dim of x, in torch."""
    weight, bias, shape = norm.weight, norm.bias, x.shape[-1:]
    wide = torch.promote_types(x.dtype, torch.float32)
    if weight is not None and norm.kind in ("rms_plus_one", "layer_plus_one"):
        # In 16 bits 1 + weight would lose what the weight has.
        x_wide, weight, bias = x.to(wide), 1 + weight.to(wide), None if bias is None else bias.to(wide)
    else:
        x_wide = x
    if norm.centred:
        return torch.nn.functional.layer_norm(x_wide, shape, weight, bias, norm.epsilon).to(x.dtype)
    return torch.nn.functional.rms_norm(x_wide, shape, weight, norm.epsilon).to(x.dtype)
