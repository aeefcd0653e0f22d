"""The choice by recall and the lists of what was chosen in Triton, each a row of key tiles a program.

In torch the same takes some thirty passes over arrays of an entry a tile, one of them a sort. A row is chosen without
one: the mass of the lightest tile that is kept is found by bisection, and sums of whole numbers are the same in any
order.
"""

# pyright: reportGeneralTypeIssues=false
# (device functions that return tl values return nothing to the checker)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.portable.config import launch

# A mass fits into 31 bits, all of them parts of `targets.PARTS` for each query tile.
_BITS = 31


@triton.jit(do_not_specialize=["slots", "key_tiles"])
def recall_kernel(Mass, Visible, Forced, Needed, Keep, slots, key_tiles, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Grid (slots, H): Keep (H, slots, key_tiles), as `targets.choose` where tiles of ``Needed`` parts are wanted."""
    slot = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * slots + slot
    column = tl.arange(0, BLOCK)
    inside = column < key_tiles
    at = slot.to(tl.int64) * key_tiles + column
    visible = tl.load(Visible + at, mask=inside, other=0) != 0
    forced = visible & (tl.load(Forced + at, mask=inside, other=0) != 0)
    mass = tl.load(Mass + row * key_tiles + column, mask=inside, other=0)
    needed = tl.load(Needed + row)
    free = visible & (forced == 0)
    wide = mass.to(tl.int64)
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
    kept = forced | (free & (wide > least)) | (alike & (heavier + before * least < needed))
    tl.store(Keep + row * key_tiles + column, kept.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["slots", "key_tiles"])
def entries_kernel(
    Keep,
    BitTile,
    Start,
    NumFull,
    Tiles,
    BitIndex,
    slots,
    key_tiles,
    BLOCK: tl.constexpr,
):
    """Grid (slots, H): the entries of each row in Tiles and BitIndex, from Start (H, slots) on, full tiles first."""
    slot = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * slots + slot
    column = tl.arange(0, BLOCK)
    inside = column < key_tiles
    keep = tl.load(Keep + row * key_tiles + column, mask=inside, other=0) != 0
    bit_tile = tl.load(BitTile + slot.to(tl.int64) * key_tiles + column, mask=inside, other=-1)
    start = tl.load(Start + row)
    full = keep & (bit_tile < 0)
    cut = keep & (bit_tile >= 0)
    place = start + tl.cumsum(full.to(tl.int32), 0) - 1
    tl.store(Tiles + place, column, mask=full)
    tl.store(BitIndex + place, bit_tile, mask=full)
    place = start + tl.load(NumFull + row) + tl.cumsum(cut.to(tl.int32), 0) - 1
    tl.store(Tiles + place, -1 - column, mask=cut)
    tl.store(BitIndex + place, bit_tile, mask=cut)


def choose_recall(mass: Tensor, visible: Tensor, forced: Tensor, share: float) -> Tensor:
    """As `targets.choose` for `Recall` below 1. Does not wait for the device."""
    heads, slots, key_tiles = mass.shape
    needed = (mass.sum(-1, dtype=torch.int64).double() * share).ceil().long()
    keep = torch.empty(mass.shape, dtype=torch.bool, device=mass.device)
    block = 1 << (key_tiles - 1).bit_length()
    arguments = mass, visible.view(torch.int8), forced.view(torch.int8), needed, keep.view(torch.int8), slots, key_tiles
    launch(recall_kernel, (slots, heads), *arguments, BLOCK=block, BITS=_BITS, num_warps=warps_of(block))
    return keep


def write_entries(
    keep: Tensor, bit_tile: Tensor, start: Tensor, num_full: Tensor, tiles: Tensor, bit_index: Tensor
) -> None:
    """Write the entries of kept tiles.

    Args:
        keep: (H, Q, K) bool.
        bit_tile: (Q, K) int32, the bit tile of a tile that is cut, else -1.
        start: (H, Q) int64, where each row's entries begin.
        num_full: (H, Q) int32, how many of them are full tiles.
        tiles, bit_index: (entries,) int32, written.
    """
    heads, slots, key_tiles = keep.shape
    block = 1 << (key_tiles - 1).bit_length()
    arguments = keep.contiguous().view(torch.int8), bit_tile, start, num_full, tiles, bit_index, slots, key_tiles
    launch(entries_kernel, (slots, heads), *arguments, BLOCK=block, num_warps=warps_of(block))


def warps_of(block: int) -> int:
    """Warps of a program for rows of so many tiles."""
    return min(8, max(1, block // 256))
