"""Layers of experts, and the tiles of which `expert_forms` finds the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longreach_kernels.moe.packed_many_kernel import STEP
from longreach_kernels.moe.tile_sizes import ManyTile, OneTile


def unpacking(rows: int, block_n: int, warps: int, stages: int, programs: int = 0, group: int = 8) -> ManyTile:
    return ManyTile(rows, block_n, STEP, warps, stages, group, programs, unpacks=True)


def twice(rows: int, block_n: int, warps: int, stages: int, programs: int = 0, group: int = 8) -> ManyTile:
    return ManyTile(rows, block_n, 128, warps, stages, group, programs, twice=True)


_UNPACKING = [
    unpacking(128, 64, 4, 3),
    unpacking(128, 64, 4, 3, 0, 4),
    unpacking(128, 64, 4, 3, 0, 2),
    unpacking(128, 64, 4, 3, 0, 16),
    unpacking(128, 64, 4, 3, 0, 1),
]
_UNPACKING_FEWER = [
    unpacking(64, 128, 4, 3),
    unpacking(64, 64, 4, 3),
    unpacking(128, 64, 4, 2),
    unpacking(128, 128, 8, 3),
]
_FP8_TWICE = [
    twice(128, 128, 8, 3, 0, 4),
    twice(128, 128, 8, 3, 0, 8),
    twice(128, 128, 8, 3, 0, 2),
    twice(128, 64, 4, 3, 0, 4),
    twice(128, 64, 4, 3, 0, 8),
    twice(128, 64, 4, 3, 0, 2),
]
_FP8_ONCE = [
    ManyTile(128, 128, 128, 8, 3, 4),
    ManyTile(128, 128, 128, 8, 4, 4),
    ManyTile(128, 128, 128, 8, 3, 4, 0),
    ManyTile(128, 64, 128, 4, 3, 4, 2),
    ManyTile(64, 128, 128, 4, 4, 8),
]
_ONE_UP = [OneTile(8, 256, 4), OneTile(16, 128, 4), OneTile(8, 128, 4), OneTile(16, 256, 8), OneTile(4, 512, 4)]
_ONE_DOWN = [OneTile(4, 256, 4), OneTile(4, 512, 4), OneTile(8, 256, 4), OneTile(2, 512, 4), OneTile(4, 512, 8)]
_ONE_PACKED_UP = [OneTile(8, 512, 4), OneTile(16, 512, 4), OneTile(8, 1024, 4), OneTile(16, 1024, 8)]
_ONE_PACKED_DOWN = [OneTile(4, 512, 4), OneTile(8, 512, 4), OneTile(4, 1024, 4), OneTile(8, 512, 8)]
_ONE_FP8_UP = [OneTile(16, 256, 4), OneTile(8, 256, 4), OneTile(4, 512, 4), OneTile(16, 256, 8)]
_ONE_FP8_DOWN = [OneTile(4, 256, 4), OneTile(2, 256, 4), OneTile(4, 256, 8)]


@dataclass(frozen=True)
class Kind:
    """Candidates for both products of a layer with so many tokens."""

    name: str
    shape: str
    tokens: int
    up: list[Any]
    down: list[Any]


KINDS = [
    Kind("mxfp4 many", "gpt-oss-20b-mxfp4", 8192, _UNPACKING, _UNPACKING),
    Kind("half one, qwen3", "qwen3-30b", 1, _ONE_UP, _ONE_DOWN),
    Kind("half one, gpt-oss", "gpt-oss-20b", 1, _ONE_UP, _ONE_DOWN),
    Kind("fp8 blocks many", "qwen3-30b-fp8-blocks", 8192, _FP8_TWICE, _FP8_TWICE),
    Kind("mxfp4 one", "gpt-oss-20b-mxfp4", 1, _ONE_PACKED_UP, _ONE_PACKED_DOWN),
    Kind("fp8 one", "qwen3-30b-fp8-blocks", 1, _ONE_FP8_UP, _ONE_FP8_DOWN),
    *(Kind(f"mxfp4 {n}", "gpt-oss-20b-mxfp4", n, _UNPACKING, _UNPACKING) for n in (640, 1024, 2048, 4096, 16384)),
    Kind("mxfp4 256", "gpt-oss-20b-mxfp4", 256, _UNPACKING_FEWER, _UNPACKING_FEWER),
    Kind("int4 many", "qwen3-30b-int4", 8192, _UNPACKING[:3], _UNPACKING[:3]),
    Kind("int4 512", "qwen3-30b-int4", 512, _UNPACKING_FEWER[:3], _UNPACKING_FEWER[:3]),
    Kind(
        "fp8 channels many",
        "qwen3-30b-fp8-channels",
        8192,
        _FP8_ONCE,
        [t._replace(block_n=2 * t.block_n) for t in _FP8_ONCE],
    ),
    Kind("int4 one", "qwen3-30b-int4", 1, _ONE_PACKED_UP[:3], _ONE_PACKED_DOWN[:3]),
    Kind("fp8 channels one", "qwen3-30b-fp8-channels", 1, _ONE_FP8_UP[:3], _ONE_FP8_DOWN[:3]),
]
