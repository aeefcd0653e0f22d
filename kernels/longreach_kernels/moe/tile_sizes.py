"""Tile sizes of the grouped products, by dtype and architecture."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from longreach_kernels.moe.sizes import MEDIUM_ROWS, ROWS_8, ROWS_16, ROWS_32, ROWS_64, TWICE_ROWS, UNPACKED_ROWS


class FewTile(NamedTuple):
    """A tile of a product of few rows: rows, outputs (of gates alone, where there are), inputs, warps, and stages."""

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class ManyTile(NamedTuple):
    """A tile of a product of many rows. `group` row tiles share their weights in the L2 cache. A multiprocessor has so
    many `programs`, which take tile after tile; 0 for a program a tile. A tile that `unpacks` reads packed weights, and
    others numbers of 16 bits. Two tiles side by side are one if it is `twice`: of FP8 in blocks alone."""

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    programs: int = 1
    unpacks: bool = False
    twice: bool = False


class OneTile(NamedTuple):
    """A tile of a product of one token: outputs (of gates alone, where there are), inputs, and warps. A kernel that
    `overlaps` begins while the one before it ends."""

    block_n: int
    block_k: int
    num_warps: int
    overlaps: bool = True


# Formats whose products of one token have kernels of their own; others take the form for few rows.
ONE_TOKEN = frozenset(("half", "fp8", "int4", "mxfp4"))


@lru_cache(maxsize=256)
def one_tile(format_: str, top_k: int | None, dtype: torch.dtype, arch: int) -> OneTile | None:
    """The tile of a product of one token with weights of a format: "half" (of the rows' dtype), "fp8", "int4" or
    "mxfp4". The product downwards is of all `top_k` experts of the token; None for the one upwards.

    Measured on an H200, microseconds of the layer, with this form and with that for few rows: Qwen3-30B 22 and 25, in
    FP8 blocks 18.6 and 22.5, in FP8 channels 19.1 and 22.6, in INT4 16.3 and 20.1; gpt-oss 52 and 55, in MXFP4 38 and
    50. Where the kernel downwards waits for the one upwards to end, Qwen3-30B takes 23.5 instead of 22.2.
    """
    if format_ not in ONE_TOKEN or arch != 90 or dtype == torch.float32:
        return None
    inputs = 256 if format_ in ("half", "fp8") else 512
    if top_k is None:
        return OneTile(8 if format_ == "half" else 16, inputs, 4)
    outputs = 8 if format_ == "int4" else 4
    while outputs > 1 and top_k > 8:  # what all experts have in registers stays as much
        outputs, top_k = outputs // 2, top_k // 2
    return OneTile(outputs, inputs, 4)


@lru_cache(maxsize=256)
def few_tile(
    pairs: int,
    experts: int,
    gated: bool,
    dtype: torch.dtype,
    arch: int,
    *,
    is_one: bool,
    is_packed: bool,
    is_fp8: bool,
    is_mxfp4: bool = False,
) -> FewTile | None:
    """The tile of a product whose rows are few for each expert; None where they are many. `arch` is a compute
    capability as one number, 0 for the interpreter. `is_one`: there is one token. `is_packed`: weights are unpacked on
    the way, those of MXFP4 if `is_mxfp4`; `is_fp8`: they are multiplied in FP8.

    Measured on an H200, microseconds of both products, Qwen3-30B at 256 tokens and gpt-oss at 256: 16 rows 317 and 592,
    32 rows 292 and 441, 64 rows 300 and 390. In FP8 at 64 tokens 16 rows take 166, 32 rows 208 and 64 rows 278: each
    program quantises its rows.

    gpt-oss's layer in MXFP4 takes in tiles of 16 and of 8 rows 112 and 90 us at 4 tokens, 194 and 162 at 16, 214 and
    187 at 32, and 216 and 245 at 64: rows that are not there, and are multiplied, take the tensor cores longer than the
    weights take the memory.
    """
    average = pairs / experts
    if average > (ROWS_32 if is_fp8 else ROWS_64):
        return None
    rows = 16 if average <= ROWS_16 else 32 if average <= ROWS_32 else 64
    if arch == 0:
        return FewTile(rows, 32, 128 if is_packed or is_fp8 else 32, 4, 1)
    if is_mxfp4 and arch == 90 and dtype != torch.float32 and average <= ROWS_8 and not is_one:
        return FewTile(8, 32, 256, 2, 3)
    if is_packed:
        return _packed_tile(min(rows, 32), gated, dtype, arch, is_one)
    if dtype == torch.float32:  # exact products run on the ordinary units, whose operands sit in registers
        return FewTile(min(rows, 32), 16, 64, 4, 2)
    if is_fp8:
        return FewTile(rows, 64, 128, 4, 4 if 90 <= arch < 120 else 2)
    if 90 <= arch < 120:
        if rows > 16:
            return FewTile(rows, 128, 64, 4, 4)
        return FewTile(rows, 64, 64, 4, 6) if is_one else FewTile(rows, 64, 128, 4, 3)
    # sm_86, sm_89 and sm_120 have 99 KB of shared memory a block.
    return FewTile(rows, 32, 128, 4, 2 if rows > 32 else 3)


def _packed_tile(rows: int, gated: bool, dtype: torch.dtype, arch: int, is_one: bool = False) -> FewTile:
    """Of weights that are unpacked on the way. Measured on an H200, microseconds, gpt-oss in MXFP4 at 64 tokens, gates:
    32x128 in 2 warps 149, 32x256 in 2 warps 161, 64x128 in 4 warps 156, 16x256 in 2 warps 287."""
    if dtype == torch.float32:
        return FewTile(rows, 16, 128, 4, 2)
    if arch < 90 or arch >= 120:
        return FewTile(rows, 32, 128, 4, 3)
    if rows > 16:
        return FewTile(rows, 64, 128, 4, 4)
    if gated:
        return FewTile(rows, 32, 256 if is_one else 128, 2, 4)
    return FewTile(rows, 64, 256, 4, 3)


@lru_cache(maxsize=256)
def many_tile(pairs: int, experts: int, gated: bool, dtype: torch.dtype, arch: int) -> ManyTile:
    """The tile of a product of many rows. Measured on an H200 at 8192 tokens, the product downwards in microseconds, in
    groups of 8 and of 4 row tiles, of which an expert has 4 (Qwen3-30B) and 8 (gpt-oss):

    | tile | Qwen3-30B | gpt-oss |
    |---|---|---|
    | 128x256, 8 warps, 4 stages | 422 | 889 |
    | 128x256, 8 warps, 3 stages | 433, 380 | 922, 989 |
    | 128x128, 4 warps, 3 stages, twice on a multiprocessor | 409, 372 | 914, 1003 |
    """
    if arch == 0:
        return ManyTile(32, 32, 32, 4, 1)
    if dtype == torch.float32:
        return ManyTile(32, 64, 32, 4, 2)
    small = pairs / experts <= MEDIUM_ROWS
    if 90 <= arch < 120:
        if small:
            return ManyTile(64, 64 if gated else 128, 64, 4, 5)
        return ManyTile(128, 128 if gated else 256, 64, 8, 4, group=_group(pairs, experts, 128))
    if small:
        return ManyTile(64, 32 if gated else 64, 64, 4, 3)
    return ManyTile(128, 64 if gated else 128, 32, 8, 3)


@lru_cache(maxsize=256)
def unpacking_tile(pairs: int, experts: int, format_: str, dtype: torch.dtype, arch: int) -> ManyTile | None:
    """The tile of a product of many rows that unpacks weights on the way; None where other forms are quicker.

    Measured on an H200, microseconds of gpt-oss's layer in MXFP4, unpacked in registers, and in the form that is next:

    | rows of an expert | in registers | else |
    |---|---:|---|
    | 8 | 233 in tiles of 32 rows, 336 of 64 | 215 in the form for few rows |
    | 16 | 236 and 340 | 327 in the form for few rows |
    | 32 | 404 in tiles of 64 rows, 499 of 128 | 467 in the form for few rows |
    | 80 | 704 and 506 | 1073 unpacked before |
    | 1024 | 5124 and 3522 | 2988 unpacked before |

    Qwen3-30B in INT4 with 512 rows takes 1322 and 1456. With 1024 rows both products of gpt-oss take 3110 in these
    tiles, and 4120 in tiles of 128 outputs and 8 warps: two programs on a multiprocessor unpack and multiply in turn.
    """
    average = pairs / experts
    few = ROWS_16 if format_ == "mxfp4" else ROWS_32
    if not few < average <= UNPACKED_ROWS[format_] or arch != 90 or dtype == torch.float32:
        return None
    rows = 32 if average <= ROWS_32 else 64 if average <= ROWS_64 else 128
    return ManyTile(rows, 64, 128, 4, 3, programs=0, unpacks=True)


@lru_cache(maxsize=256)
def fp8_tile(pairs: int, experts: int, gated: bool, dtype: torch.dtype, arch: int, *, by_group: bool) -> ManyTile:
    """The tile of a product of many rows in FP8. `by_group`, its inputs are those of one scale, and sums of these take
    as many registers as the tile's.

    Measured on an H200, microseconds of Qwen3-30B's layer at 8192 tokens: by group in tiles of 64 rows 1136, in
    tiles of 128 that are two side by side 1013; by token 786.
    """
    small = pairs / experts <= MEDIUM_ROWS
    if 90 <= arch < 120:
        if by_group and arch == 90 and pairs / experts > TWICE_ROWS:
            group = _group(pairs, experts, 128)
            if gated:
                return ManyTile(128, 128, 128, 8, 3, group, programs=0, twice=True)
            return ManyTile(128, 64, 128, 4, 3, group, programs=0, twice=True)
        if by_group:
            return ManyTile(64, 64 if gated else 128, 128, 4, 4, _group(pairs, experts, 64), programs=2)
        if small:
            return ManyTile(64, 64 if gated else 128, 128, 4, 4)
        return ManyTile(128, 128 if gated else 256, 128, 8, 3, group=_group(pairs, experts, 128))
    return ManyTile(64, 32 if gated else 64, 128, 4, 2) if small else ManyTile(128, 64, 128, 8, 2)


def _group(pairs: int, experts: int, rows: int) -> int:
    """About as many row tiles as an expert has: they read the same weights."""
    tiles = pairs // (experts * rows)
    return 4 if tiles < 6 else 8 if tiles < 12 else 16


def invariant_tile(pairs: int, experts: int, gated: bool, dtype: torch.dtype, arch: int) -> ManyTile:
    """One of the tiles that give the same bits: each has 64 rows or more for four warps, so that the compiler takes one
    and the same matrix instruction, and sums over the inputs in ascending order."""
    tile = many_tile(pairs, experts, gated, dtype, arch)
    if 90 <= arch < 120 and dtype != torch.float32 and pairs / experts <= ROWS_16:
        return ManyTile(64, 32, 128, 4, 5)
    return tile


def invariant_packed_tile(gated: bool, dtype: torch.dtype, arch: int) -> FewTile:
    """The one tile of weights that are unpacked on the way, for any number of rows. It suits steps of few tokens: many
    read and unpack the weights again for each 32 rows."""
    if arch == 0:
        return FewTile(32, 32, 128, 4, 1)
    return _packed_tile(32, gated, dtype, arch)


def is_gathered_first(outputs: int) -> bool:
    """Whether rows of tokens are brought into order before a product of many rows, and not while it runs.

    Measured on an H200 at 8192 tokens, microseconds, with the gathering: gpt-oss (2880 outputs) 1683 against 1870,
    Qwen3-30B (768 outputs) 777 against 664.
    """
    return outputs >= 2048
