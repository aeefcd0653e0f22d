"""Pairs of a token and an expert, sorted by expert on the device, and the tiles that cover them.

The same pairs always lie alike: in the order of their experts, and of their numbers within an expert. The host learns
nothing of how many there are of each. Few pairs take one kernel, in which each expert's program counts all pairs and so
knows where its own begin. Many take three: chunks are counted, counts are added up, and each chunk writes its pairs.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.moe.sizes import FEW_PAIRS

_FEW_BLOCK = 256  # pairs that a program reads at a time
_CHUNK = 128
_SCANNED, _BINS = 128, 8  # chunks and experts of a turn of the scan


class SortedPairs(NamedTuple):
    """P = T k pairs, numbered t k + j, as rows sorted by expert, and tiles of rows of one expert each.

    Attributes:
        order: (P,) int32: the pair of each row. Rows of pairs that were skipped are not there, and are the last.
        places: (P,) int32: the row of each pair that was not skipped.
        tiles: (3, most tiles) int32: of each tile the expert, of this rank's, its first row, and the row behind its
            last. Only the first `num_tiles` are there.
        num_tiles: (2,) int32: of tiles, and of the rows that are there.
    """

    order: Tensor
    places: Tensor
    tiles: Tensor
    num_tiles: Tensor


@triton.jit
def _numbers(Chosen, offs, num_pairs, E: tl.constexpr, FIRST: tl.constexpr):
    """The experts of pairs, from 0 on; E for those that are not here."""
    number = tl.load(Chosen + offs, mask=offs < num_pairs, other=-1).to(tl.int32) - FIRST
    return tl.where((number >= 0) & (number < E) & (offs < num_pairs), number, E)


@triton.jit
def _write_tiles(Tiles, NumTiles, counts, expert, most_tiles, tile_rows, BINS: tl.constexpr):
    """Write the tiles of an expert, by the counts (BINS,) of all; returns its first row."""
    bins = tl.arange(0, BINS)
    tiles = (counts + tile_rows - 1) // tile_rows
    mine = bins == expert
    count = tl.sum(tl.where(mine, counts, 0), 0)
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    own_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    if expert == 0:
        tl.store(NumTiles, tl.sum(tiles, 0))
        tl.store(NumTiles + 1, tl.sum(counts, 0))
    for start in range(0, own_tiles, BINS):
        index = start + bins
        row = first + index * tile_rows
        there = index < own_tiles
        place = Tiles + first_tile + index
        tl.store(place, tl.zeros((BINS,), tl.int32) + expert, mask=there)
        tl.store(place + most_tiles, row, mask=there)
        tl.store(place + 2 * most_tiles, tl.minimum(row + tile_rows, first + count), mask=there)
    return first


@triton.jit(do_not_specialize=["num_pairs", "most_tiles", "tile_rows"])
def _sort_kernel(
    Chosen,
    Order,
    Places,
    Tiles,
    NumTiles,
    num_pairs,
    most_tiles,
    tile_rows,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (E,)."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    offs = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        counts += tl.histogram(_numbers(Chosen, start + offs, num_pairs, E, FIRST), BINS)
    counts = tl.where(bins < E, counts, 0)
    row = _write_tiles(Tiles, NumTiles, counts, expert, most_tiles, tile_rows, BINS)
    for start in range(0, num_pairs, BLOCK):
        own = _numbers(Chosen, start + offs, num_pairs, E, FIRST) == expert
        place = row + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(Order + place, start + offs, mask=own)
        tl.store(Places + start + offs, place, mask=own)
        row += tl.sum(own.to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    Chosen, Counts, Ranks, num_pairs, E: tl.constexpr, FIRST: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):
    """Grid (chunks,): how many pairs of the chunk each expert has, and how many of a pair's expert come before it."""
    chunk = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    number = _numbers(Chosen, chunk * CHUNK + place, num_pairs, E, FIRST)
    tl.store(Counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(number, BINS))
    before = (number[:, None] == number[None, :]) & (place[None, :] < place[:, None])
    tl.store(Ranks + chunk * CHUNK + place, tl.sum(before.to(tl.int32), 1))


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(Counts, Totals, chunks, BINS: tl.constexpr, BLOCK: tl.constexpr, SCANNED: tl.constexpr):
    """Grid (blocks of bins,): counts of chunks become the sums of those before them."""
    bins = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, SCANNED)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, chunks, SCANNED):
        there = (start + place < chunks)[:, None]
        places = Counts + (start + place)[:, None] * BINS + bins[None, :]
        counts = tl.load(places, mask=there, other=0)
        tl.store(places, total[None, :] + tl.cumsum(counts, 0) - counts, mask=there)
        total += tl.sum(counts, 0)
    tl.store(Totals + bins, total)


@triton.jit(do_not_specialize=["num_pairs", "most_tiles", "tile_rows", "chunks"])
def _place_kernel(
    Chosen,
    Counts,
    Ranks,
    Totals,
    Order,
    Places,
    Tiles,
    NumTiles,
    num_pairs,
    most_tiles,
    tile_rows,
    chunks,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (chunks and experts,)."""
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(Totals + bins, mask=bins < E, other=0)
    if chunk >= chunks:
        _write_tiles(Tiles, NumTiles, counts, chunk - chunks, most_tiles, tile_rows, BINS)
    else:
        offs = chunk * CHUNK + tl.arange(0, CHUNK)
        number = _numbers(Chosen, offs, num_pairs, E, FIRST)
        own = number < E
        first = tl.gather(tl.cumsum(counts, 0) - counts, number, 0)
        place = first + tl.load(Counts + chunk * BINS + number) + tl.load(Ranks + offs)
        tl.store(Order + place, offs, mask=own)
        tl.store(Places + offs, place, mask=own)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """How many tiles of so many rows there can be at most."""
    return max(1, (pairs + (rows - 1) * min(experts, pairs)) // rows)


def sort_pairs(chosen: Tensor, experts: int, first: int, rows: int) -> SortedPairs:
    """Sort the pairs of `chosen` (T, k), and cover them with tiles of `rows` rows. Pairs whose expert is not among
    `experts` from number `first` on are skipped."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=chosen.device)

    pairs = chosen.numel()
    most = most_tiles(pairs, experts, rows)
    found = SortedPairs(new(pairs), new(pairs), new(3, most), new(2))
    bins = max(16, triton.next_power_of_2(experts + 1))
    sizes = {"E": experts, "FIRST": first, "BINS": bins}
    if pairs <= FEW_PAIRS:
        launch(_sort_kernel, (experts,), chosen, *found, pairs, most, rows, **sizes, BLOCK=_FEW_BLOCK, num_warps=4)
        return found
    chunks = cdiv(pairs, _CHUNK)
    counts, ranks, totals = new(chunks, bins), new(chunks * _CHUNK), new(bins)
    launch(_count_kernel, (chunks,), chosen, counts, ranks, pairs, **sizes, CHUNK=_CHUNK, num_warps=4)
    launch(_scan_kernel, (bins // _BINS,), counts, totals, chunks, BINS=bins, BLOCK=_BINS, SCANNED=_SCANNED)
    launch(
        _place_kernel,
        (chunks + experts,),
        chosen,
        counts,
        ranks,
        totals,
        *found,
        pairs,
        most,
        rows,
        chunks,
        **sizes,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return found
