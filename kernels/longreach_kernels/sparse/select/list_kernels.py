"""The choice by recall and the lists of what was chosen in Triton, each a row of key tiles a program.

In torch the same takes some thirty passes over arrays of an entry a tile, one of them a sort. A row is chosen without
one: the mass of the lightest tile that is kept is found by bisection, and sums of whole numbers are the same in any
order.
"""

# pyright: reportGeneralTypeIssues=false
# (device functions that return tl values return nothing to the checker)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import launch
from longreach_kernels.sparse.select.lists import ListFrame

# A mass fits into 31 bits, all of them parts of `targets.PARTS` for each query tile.
_BITS = 31


@triton.jit
def _needed(wide, free, forced, share, BITS: tl.constexpr):
    """Of a row's tiles that are ``free`` those that a recall of ``share`` keeps beside the ``forced`` ones."""
    needed = tl.ceil(tl.sum(wide, 0).to(tl.float64) * share).to(tl.int64)
    first = tl.sum(tl.where(forced, wide, 0), 0)
    # The least mass of which all that is heavier, with what is forced, does not hold what is needed.
    least = tl.zeros((), tl.int64)
    for bit in range(BITS):
        tried = least + ((1 << (BITS - 1)) >> bit)
        heavier = first + tl.sum(tl.where(free & (wide > tried - 1), wide, 0), 0)
        least = tl.where(heavier >= needed, tried, least)
    heavier = first + tl.sum(tl.where(free & (wide > least), wide, 0), 0)
    alike = free & (wide == least)
    before = tl.cumsum(alike.to(tl.int32), 0) - alike.to(tl.int32)
    return (free & (wide > least)) | (alike & (heavier + before * least < needed))


@triton.jit(do_not_specialize=["slots", "key_tiles", "strips"])
def recall_kernel(
    Mass, Visible, Forced, Share, Keep, slots, key_tiles, strips, BLOCK: tl.constexpr, BITS: tl.constexpr
):
    """Grid (slots, H): Keep (H, slots, key_tiles), as `targets.choose` for a recall of Share, one fp64, by the mass
    (H, slots, strips, key_tiles).
    """
    slot = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * slots + slot
    column = tl.arange(0, BLOCK)
    inside = column < key_tiles
    at = slot.to(tl.int64) * key_tiles + column
    visible = tl.load(Visible + at, mask=inside, other=0) != 0
    forced = visible & (tl.load(Forced + at, mask=inside, other=0) != 0)
    free = visible & (forced == 0)
    share = tl.load(Share)
    kept = forced
    for strip in range(strips):
        mass = tl.load(Mass + (row * strips + strip) * key_tiles + column, mask=inside, other=0)
        kept = kept | _needed(mass.to(tl.int64), free, forced, share, BITS)
    tl.store(Keep + row * key_tiles + column, kept.to(tl.int8), mask=inside)


@triton.jit
def _kept_tiles(Keep, BitTile, Row, slots, key_tiles, BLOCK: tl.constexpr):
    """The row of this program's slot and head; of its key tiles, which are kept, and their bit tiles."""
    slot = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64) * slots + slot
    column = tl.arange(0, BLOCK)
    inside = column < key_tiles
    keep = tl.load(Keep + at * key_tiles + column, mask=inside, other=0) != 0
    bit_tile = tl.load(BitTile + slot.to(tl.int64) * key_tiles + column, mask=inside, other=-1)
    return tl.load(Row + at), keep, bit_tile


@triton.jit(do_not_specialize=["slots", "key_tiles"])
def count_kernel(Keep, BitTile, Row, Count, NumFull, slots, key_tiles, BLOCK: tl.constexpr):
    """Grid (slots, H): how many tiles are kept, and how many of them are full, to Count and NumFull at the slot's
    row.
    """
    row, keep, bit_tile = _kept_tiles(Keep, BitTile, Row, slots, key_tiles, BLOCK)
    tl.store(Count + row, tl.sum(keep.to(tl.int32), 0))
    tl.store(NumFull + row, tl.sum((keep & (bit_tile < 0)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["slots", "key_tiles"])
def entries_kernel(Keep, BitTile, Row, Start, NumFull, Tiles, BitIndex, slots, key_tiles, BLOCK: tl.constexpr):
    """Grid (slots, H): the entries of each slot in Tiles and BitIndex, from Start of its row on, full tiles first."""
    row, keep, bit_tile = _kept_tiles(Keep, BitTile, Row, slots, key_tiles, BLOCK)
    start = tl.load(Start + row)
    full = keep & (bit_tile < 0)
    cut = keep & (bit_tile >= 0)
    column = tl.arange(0, BLOCK)
    place = start + tl.cumsum(full.to(tl.int32), 0) - 1
    tl.store(Tiles + place, column, mask=full)
    tl.store(BitIndex + place, bit_tile, mask=full)
    place = start + tl.load(NumFull + row) + tl.cumsum(cut.to(tl.int32), 0) - 1
    tl.store(Tiles + place, -1 - column, mask=cut)
    tl.store(BitIndex + place, bit_tile, mask=cut)


def choose_recall(mass: Tensor, visible: Tensor, forced: Tensor, share: float) -> Tensor:
    """As `targets.choose` for `Recall` below 1. Does not wait for the device."""
    heads, slots, strips, key_tiles = mass.shape
    shares = torch.full((), share, dtype=torch.float64, device=mass.device)
    keep = torch.empty((heads, slots, key_tiles), dtype=torch.bool, device=mass.device)
    block = block_of(key_tiles)
    seen = visible.view(torch.int8), forced.view(torch.int8)
    launch(
        recall_kernel,
        (slots, heads),
        mass,
        *seen,
        shares,
        keep.view(torch.int8),
        slots,
        key_tiles,
        strips,
        BLOCK=block,
        BITS=_BITS,
        num_warps=warps_of(block),
    )
    return keep


def count_entries(keep: Tensor, frame: ListFrame) -> tuple[Tensor, Tensor]:
    """Entries and full tiles of each row of kept tiles (H, Q, K) bool; two (rows + 1,) int32, the last ones 0."""
    # One more: the row of slots without a tile. Tensors of their own, so that all begin at a multiple of 16 bytes:
    # for one that does not, Triton compiles another kernel.
    count, full = (torch.zeros(frame.rows + 1, dtype=torch.int32, device=keep.device) for _ in range(2))
    _launch_rows(count_kernel, keep, frame, count, full)
    return count, full


def write_entries(keep: Tensor, frame: ListFrame, start: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of kept tiles and their bit tiles.

    Args:
        keep: (H, Q, K) bool.
        frame: where they go.
        start: (rows + 1,) int32, where each row's entries begin.
        full: (rows + 1,) int32, how many of them are full tiles.

    Returns:
        Two (H * Q * K,) int32, 0 after the last entry.
    """
    tiles, bit_index = (torch.zeros(keep.numel(), dtype=torch.int32, device=keep.device) for _ in range(2))
    _launch_rows(entries_kernel, keep, frame, start, full, tiles, bit_index)
    return tiles, bit_index


def _launch_rows(kernel: Any, keep: Tensor, frame: ListFrame, *given: Tensor) -> None:
    """Launch a program for each slot and head of ``keep``."""
    heads, slots, key_tiles = keep.shape
    block = block_of(key_tiles)
    arguments = keep.contiguous().view(torch.int8), frame.bit_tile, frame.row, *given, slots, key_tiles
    launch(kernel, (slots, heads), *arguments, BLOCK=block, num_warps=warps_of(block))


def block_of(key_tiles: int) -> int:
    """Places of a row: a power of two, and not a small one, since each is another kernel to compile."""
    return max(256, 1 << (key_tiles - 1).bit_length())


def warps_of(block: int) -> int:
    """Warps of a program for rows of so many tiles."""
    return min(8, max(1, block // 256))
