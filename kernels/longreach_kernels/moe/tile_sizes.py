"""Tile sizes of the grouped products, by dtype and architecture."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from longreach_kernels.moe.sizes import FEW_ROWS, MEDIUM_ROWS, SOME_ROWS


class FewTile(NamedTuple):
    """A tile of a product of few rows: rows, outputs (of gates alone, where there are), inputs, warps, and stages."""

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class ManyTile(NamedTuple):
    """A tile of a product of many rows. `group` row tiles share their weights in the L2 cache. A multiprocessor has so
    many `programs`, which take tile after tile; 0 for a program a tile."""

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    programs: int = 1


@lru_cache(maxsize=256)
def few_tile(
    pairs: int, experts: int, gated: bool, dtype: torch.dtype, arch: int, *, is_packed: bool
) -> FewTile | None:
    """The tile of a product whose rows are few for each expert; None where they are many. `arch` is a compute
    capability as one number, 0 for the interpreter. `is_packed`: the weights are not of 16
    bits."""
    average = pairs / experts
    if average > SOME_ROWS:
        return None
    rows = 16 if average <= FEW_ROWS else 32
    if arch == 0:
        return FewTile(rows, 32, 256, 2, 1) if is_packed else FewTile(rows, 32, 32, 4, 1)
    if is_packed:
        return _packed_tile(rows, gated, dtype, arch)
    if dtype == torch.float32:  # exact products run on the ordinary units, whose operands sit in registers
        return FewTile(rows, 16, 64, 4, 2)
    if 90 <= arch < 120:
        return FewTile(rows, 64, 128, 4, 3)
    # sm_86, sm_89 and sm_120 have 99 KB of shared memory a block.
    return FewTile(rows, 32, 128, 4, 3)


def _packed_tile(rows: int, gated: bool, dtype: torch.dtype, arch: int) -> FewTile:
    """Of weights that are unpacked on the way: a warp has 128 of the inputs."""
    if dtype == torch.float32:
        return FewTile(rows, 16, 256, 2, 2)
    if arch < 90 or arch >= 120:
        return FewTile(rows, 16 if gated else 32, 256, 2, 2)
    return FewTile(rows, 32, 512, 4, 3)


@lru_cache(maxsize=256)
def many_tile(pairs: int, experts: int, gated: bool, dtype: torch.dtype, arch: int) -> ManyTile:
    """The tile of a product of many rows."""
    if arch == 0:
        return ManyTile(32, 32, 32, 4, 1)
    if dtype == torch.float32:
        return ManyTile(32, 64, 32, 4, 2)
    small = pairs / experts <= MEDIUM_ROWS
    if 90 <= arch < 120:
        if small:
            return ManyTile(64, 64 if gated else 128, 64, 4, 5)
        return ManyTile(128, 128, 64, 8, 4) if gated else ManyTile(128, 256, 64, 8, 4)
    if small:
        return ManyTile(64, 32 if gated else 64, 64, 4, 3)
    return ManyTile(128, 64 if gated else 128, 32, 8, 3)


@lru_cache(maxsize=256)
def fp8_tile(pairs: int, experts: int, gated: bool, dtype: torch.dtype, arch: int, *, by_group: bool) -> ManyTile:
    """The tile of a product of many rows in FP8. `by_group`, its inputs are those of one scale, and sums of these take
    as many registers as the tile's."""
    small = pairs / experts <= MEDIUM_ROWS
    if 90 <= arch < 120:
        if by_group:
            return ManyTile(64, 64 if gated else 128, 128, 4, 4, programs=2)
        if small:
            return ManyTile(64, 64 if gated else 128, 128, 4, 4)
        return ManyTile(128, 128 if gated else 256, 128, 8, 3)
    return ManyTile(64, 32 if gated else 64, 128, 4, 2) if small else ManyTile(128, 64, 128, 8, 2)


def invariant_tile(pairs: int, experts: int, gated: bool, dtype: torch.dtype, arch: int) -> ManyTile:
    """One of the tiles that give the same bits: each has 64 rows or more for four warps, so that the compiler takes one
    and the same matrix instruction, and sums over the inputs in ascending order."""
    tile = many_tile(pairs, experts, gated, dtype, arch)
    if 90 <= arch < 120 and dtype != torch.float32 and pairs / experts <= FEW_ROWS:
        return ManyTile(64, 32, 128, 4, 5)
    return tile


def is_gathered_first(outputs: int) -> bool:
    """Whether rows of tokens are brought into order before a product of many rows, and not while it runs.

    Measured on an H200 at 8192 tokens, microseconds, with the gathering: gpt-oss (2880 outputs) 1683 against 1870,
    Qwen3-30B (768 outputs) 777 against 664.
    """
    return outputs >= 2048
