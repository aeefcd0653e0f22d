"""Masks of some of the heads, for whoever computes only those."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .masks import Mask, _NamedMask


@dataclass(frozen=True)
class HeadSlice(_NamedMask):
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


def head_slice(mask: Mask, heads: int, start: int, end: int) -> Mask:
    """The mask of the query heads ``start <= h < end`` out of `heads`, as those alone are computed with.

    Raises:
        ValueError: the mask tells heads apart in a way that does not divide `heads`.
    """
    if heads % mask.heads:
        raise ValueError(f"mask: the {mask.heads} heads that it tells apart do not divide the {heads} query heads")
    if mask.heads == 1 or end - start == heads:
        return mask
    sharing = heads // mask.heads
    of_each = tuple(head // sharing for head in range(start, end))
    # The fewest heads told apart, for heads that share a mask are computed together.
    count = len(of_each)
    for told_apart in range(1, count + 1):
        run = count // told_apart
        chosen = of_each[::run]
        if count % told_apart == 0 and of_each == tuple(head for head in chosen for _ in range(run)):
            return HeadSlice(mask, chosen)
    raise AssertionError("every head by itself always fits")
