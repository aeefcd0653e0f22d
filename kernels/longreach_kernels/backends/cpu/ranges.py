"""Which ranges of keys a tile of queries visits under any mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach_kernels.masks.mask import Mask
from longreach_kernels.masks.tile_ranges import TileRange, key_ranges
from longreach_kernels.sizes import TILE

# Queries and keys of a tile where a mask has no closed form.


@dataclass(frozen=True)
class OneHead(Mask):
    """One head of a mask that tells heads apart."""

    mask: Mask
    head: int

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`."""
        return self.mask.sees(q, k, self.head)

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`."""
        some, every = self.mask.tile_state(q, k)
        return some[self.head : self.head + 1], every[self.head : self.head + 1]


def visible_ranges(mask: Mask, q_start: int, q_end: int, num_keys: int) -> Sequence[TileRange]:
    """Ranges of keys that the queries at positions ``q_start <= q < q_end`` visit."""
    if mask.band is not None:
        return key_ranges(mask, q_start, q_end, num_keys, 1)
    if num_keys == 0:
        return ()
    edges = torch.arange(0, num_keys, TILE)
    edges = torch.stack([edges, (edges + TILE).clamp(max=num_keys) - 1], dim=1)
    some, every = mask.tile_state(torch.tensor([[q_start, q_end - 1]]), edges)
    state = (some[0, 0].int() + (some & every)[0, 0].int()).tolist()  # 0 none, 1 partial, 2 full
    ranges: list[TileRange] = []
    for i, kind in enumerate(state):
        start, end = i * TILE, min((i + 1) * TILE, num_keys)
        if kind and ranges and ranges[-1].end == start and ranges[-1].partial == (kind == 1):
            ranges[-1] = TileRange(ranges[-1].start, end, kind == 1)
        elif kind:
            ranges.append(TileRange(start, end, kind == 1))
    return ranges
