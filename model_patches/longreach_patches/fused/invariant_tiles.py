"""Which tiles a product of `invariant` is computed in: a choice that changes its time, and not one bit of it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from longreach_kernels.backends.triton.config import cdiv


class Tile(NamedTuple):
    """Rows, outputs and inputs of a tile, warps, loads in flight, and programs on a multiprocessor."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 1


# Smallest first. On sm_90 every one has 64 rows or more for each group of four warps: with fewer the compiler would
# take another matrix instruction, whose sums may be rounded otherwise.
_HOPPER = (
    Tile(64, 32, 128, 4, 6),
    Tile(64, 64, 128, 4, 6),
    Tile(64, 128, 64, 4, 6),
    Tile(128, 128, 64, 8, 6),
    Tile(128, 256, 64, 8, 4),
)
_HOPPER_GATED = (
    Tile(64, 32, 128, 4, 5),
    Tile(64, 64, 64, 4, 6),
    Tile(128, 64, 64, 8, 6),
    Tile(128, 128, 64, 8, 4),
)
# sm_86, sm_89 and sm_120 have 99 KB of shared memory a block.
_OTHERS = (Tile(64, 64, 64, 4, 3), Tile(128, 128, 32, 8, 3))
_OTHERS_GATED = (Tile(64, 32, 64, 4, 3), Tile(128, 64, 32, 8, 3))
# Exact fp32 products run on the ordinary units, whose operands sit in registers.
_EXACT = (Tile(32, 64, 32, 4, 2),)
# What a number from the L2 cache costs, and what a step of a tile costs beside its numbers, in pairs: estimates, by
# which a tile of 128x256 is bound by both alike on an H200.
_LOAD = 85
_STEP = 1000
# One for all in the interpreter, whose products are numpy's: those do depend on the shape.
_INTERPRETED = (Tile(32, 32, 32, 4, 1),)


def candidates(dtype: torch.dtype, arch: int, gated: bool) -> tuple[Tile, ...]:
    """The tiles for a dtype and a compute capability (90 for 9.0, 0 for the interpreter). All give the same bits."""
    if arch == 0:
        return _INTERPRETED
    if dtype == torch.float32:
        return _EXACT
    if 90 <= arch < 100:
        return _HOPPER_GATED if gated else _HOPPER
    others = _OTHERS_GATED if gated else _OTHERS
    # sm_100 has one instruction for 64 rows and one for 128; whether they round alike has not been tested.
    return others[1:] if 100 <= arch < 120 else others


def tiles_of(tile: Tile, rows: int, outputs: int) -> int:
    """How many tiles a product has."""
    return cdiv(rows, tile.block_m) * cdiv(outputs, tile.block_n)


@lru_cache(maxsize=4096)
def choose(rows: int, outputs: int, dtype: torch.dtype, arch: int, processors: int, gated: bool) -> Tile:
    """The tile that is predicted to be the quickest.

    For each input a multiprocessor multiplies `block_m * block_n` pairs, and meanwhile brings `block_m + block_n`
    numbers from the L2 cache: small tiles are bound by the latter.
    """

    def cost(tile: Tile) -> float:
        width = tile.block_n * (2 if gated else 1)
        present = min(rows, tile.block_m)  # rows that do not exist are multiplied, but not brought
        rounds = cdiv(tiles_of(tile, rows, outputs), processors * tile.programs) * tile.programs
        return rounds * (max(tile.block_m * width, _LOAD * (present + width)) + _STEP)

    return min(candidates(dtype, arch, gated), key=cost)
