"""Tile lists as a mask: what a caller's lists mean, for the backends that evaluate masks themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longreach_kernels.masks.mask import Mask
from longreach_kernels.masks.tile_lists import TileLists

_NONE, _FULL = -2, -1


@dataclass(frozen=True, eq=False)
class ListedMask(Mask):
    """What the lists of one sequence let through, on the CPU. Made by `listed_masks`.

    Attributes:
        lists: of the whole batch.
        offset: position of the sequence's first query.
        state: (H, query tiles, key tiles) int32: the bit tile of a partial tile, -1 for a full tile, -2 for none.
    """

    lists: TileLists
    offset: int
    state: Tensor

    @property
    def heads(self) -> int:
        """See `Mask.heads`."""
        return self.lists.heads

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`; the positions are those of the sequence's queries and keys."""
        tile_q, tile_k = self.lists.tile_q, self.lists.tile_k
        row = q - self.offset
        state = self.state[head, row // tile_q, k // tile_k]
        words = self.lists.bits.cpu()
        if len(words) == 0:
            return state == _FULL
        word = words[state.clamp(min=0).long(), row % tile_q, k % tile_k // 32]
        return torch.where(state < 0, state == _FULL, (word >> (k % 32)) & 1 != 0)

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`."""
        rows, columns = (q - self.offset) // self.lists.tile_q, k // self.lists.tile_k
        first, stop = rows[:, 0][:, None], rows[:, 1][:, None] + 1
        left, right = columns[:, 0][None], columns[:, 1][None] + 1
        listed, full = (
            sums[:, stop, right] - sums[:, first, right] - sums[:, stop, left] + sums[:, first, left]
            for sums in self._sums
        )
        return listed > 0, full == (stop - first) * (right - left)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Summed-area tables of the tiles that are listed and of those that are full: four entries count any
        rectangle of tiles."""
        heads, rows, columns = self.state.shape
        listed, full = (torch.zeros(heads, rows + 1, columns + 1, dtype=torch.int32) for _ in range(2))
        listed[:, 1:, 1:] = (self.state >= _FULL).int().cumsum(1).cumsum(2)
        full[:, 1:, 1:] = (self.state == _FULL).int().cumsum(1).cumsum(2)
        return listed, full


def listed_masks(lists: TileLists, queries: Sequence[int], keys: Sequence[int]) -> list[ListedMask]:
    """One mask a sequence, on the CPU, for sequences of so many queries and keys. Waits for the device."""
    start, tiles, bit_index, first_row = (
        x.cpu().long() for x in (lists.start, lists.tiles, lists.bit_index, lists.first_row)
    )
    masks = []
    for b, (num_queries, num_keys) in enumerate(zip(queries, keys, strict=True)):
        q_tiles, k_tiles = -(-num_queries // lists.tile_q), -(-num_keys // lists.tile_k)
        first = int(first_row[b])
        bounds = start[first : first + lists.heads * q_tiles + 1]
        state = torch.full((lists.heads * q_tiles, k_tiles), _NONE, dtype=torch.int32)
        if lists.heads * q_tiles:
            inside = slice(int(bounds[0]), int(bounds[-1]))
            row = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
            entries = tiles[inside]
            state[row, torch.where(entries < 0, -1 - entries, entries)] = bit_index[inside].int()
        masks.append(ListedMask(lists, num_keys - num_queries, state.view(lists.heads, q_tiles, k_tiles)))
    return masks
