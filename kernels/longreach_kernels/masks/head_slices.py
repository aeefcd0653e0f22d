"""Masks of some of the heads, for whoever computes only those."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach_kernels.masks.block_rules import BlockRule, for_heads
from longreach_kernels.masks.mask import Mask, NamedMask


@dataclass(frozen=True)
class HeadSlice(NamedMask):
    """A mask with some of the heads that `mask` tells apart: head h of this one is head ``chosen[h]`` of that one."""

    mask: Mask
    chosen: tuple[int, ...]

    @property
    def heads(self) -> int:
        """How many were chosen."""
        return len(self.chosen)

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`."""
        if not isinstance(head, Tensor):
            return self.mask.sees(q, k, self.chosen[head])
        return self.mask.sees(q, k, torch.tensor(self.chosen, device=head.device)[head])

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`."""
        some, every = self.mask.tile_state(q, k)
        chosen = torch.tensor(self.chosen, device=some.device)
        return some[chosen], every[chosen]


def head_slice(mask: Mask, heads: int, part: range) -> Mask:
    """The mask of the query heads `part` out of `heads`, as those alone are computed with.

    `part` is one of the even runs that `heads` are split into. As `block_rules.for_heads`, for masks of every kind.

    Raises:
        ValueError: the heads that the mask tells apart do not divide `heads`.
    """
    if heads % mask.heads:
        raise ValueError(f"mask: the {mask.heads} heads that it tells apart do not divide the {heads} query heads")
    if mask.heads == 1 or len(part) == heads:
        return mask
    if isinstance(mask, BlockRule):
        return for_heads(mask, part, heads)
    sharing = heads // mask.heads  # query heads that share a mask
    chosen = tuple(head // sharing for head in part[:: math.gcd(sharing, len(part))])
    return HeadSlice(mask, chosen[:1] if len(set(chosen)) == 1 else chosen)
