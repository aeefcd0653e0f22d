"""Pairs of a token and an expert, sorted by expert on the device, and the tiles that cover them.

Each expert's program counts all pairs, and so knows where its own begin without asking the others. It then writes them
in ascending order: the same pairs always lie alike, and the host learns nothing.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import launch

_BLOCK, _SMALL_BLOCK = 4096, 256  # pairs that a program reads at a time


class SortedPairs(NamedTuple):
    """P = T k pairs, numbered t k + j, as rows sorted by expert, and tiles of rows of one expert each.

    Attributes:
        order: (P,) int32: the pair of each row. Rows of pairs that were skipped are not there, and are the last.
        tiles: (3, most tiles) int32: of each tile the expert, of this rank's, its first row, and the row behind its
            last. Only the first `num_tiles` are there.
        num_tiles: (1,) int32.
    """

    order: Tensor
    tiles: Tensor
    num_tiles: Tensor


@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def _sort_kernel(
    Chosen,
    Order,
    Tiles,
    NumTiles,
    num_pairs,
    most_tiles,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (E,)."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    offs = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        number = tl.load(Chosen + start + offs, mask=start + offs < num_pairs, other=-1).to(tl.int32) - FIRST
        number = tl.where((number >= 0) & (number < E), number, E)
        counts += tl.histogram(number, BINS)
    counts = tl.where(bins < E, counts, 0)
    tiles = (counts + ROWS - 1) // ROWS
    mine = bins == expert
    count = tl.sum(tl.where(mine, counts, 0), 0)
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    own_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    if expert == 0:
        tl.store(NumTiles, tl.sum(tiles, 0))
    for start in range(0, own_tiles, BINS):
        index = start + bins
        row = first + index * ROWS
        there = index < own_tiles
        place = Tiles + first_tile + index
        tl.store(place, tl.zeros((BINS,), tl.int32) + expert, mask=there)
        tl.store(place + most_tiles, row, mask=there)
        tl.store(place + 2 * most_tiles, tl.minimum(row + ROWS, first + count), mask=there)
    row = first
    for start in range(0, num_pairs, BLOCK):
        number = tl.load(Chosen + start + offs, mask=start + offs < num_pairs, other=-1).to(tl.int32) - FIRST
        own = (number == expert) & (start + offs < num_pairs)
        place = row + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(Order + place, start + offs, mask=own)
        row += tl.sum(own.to(tl.int32), 0)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """How many tiles of so many rows there can be at most."""
    return max(1, (pairs + (rows - 1) * min(experts, pairs)) // rows)


def sort_pairs(chosen: Tensor, experts: int, first: int, rows: int) -> SortedPairs:
    """Sort the pairs of `chosen` (T, k), and cover them with tiles of `rows` rows. Pairs whose expert is not among
    `experts` from number `first` on are skipped."""
    pairs = chosen.numel()
    most = most_tiles(pairs, experts, rows)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(3, most, dtype=torch.int32, device=chosen.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=chosen.device)
    launch(
        _sort_kernel,
        (experts,),
        chosen,
        order,
        tiles,
        num_tiles,
        pairs,
        most,
        E=experts,
        FIRST=first,
        BINS=max(16, triton.next_power_of_2(experts + 1)),
        ROWS=rows,
        BLOCK=_SMALL_BLOCK if pairs <= 4 * _SMALL_BLOCK else _BLOCK,
        num_warps=4 if pairs <= 4 * _SMALL_BLOCK else 8,
    )
    return SortedPairs(order, tiles, num_tiles)
