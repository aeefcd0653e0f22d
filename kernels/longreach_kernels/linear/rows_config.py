"""Tiles of the products of few rows, by format, outputs, rows and architecture: fixed, and kept in one table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from longreach_kernels.backends.triton.config import cdiv
from longreach_kernels.linear import unpack

MAX_ROWS = 32  # of a tile


class RowsConfig(NamedTuple):
    """Tile of the weight (outputs, inputs), warps, and loads in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def slices(self, layout: int) -> int:
        """SLICES of `tiles.rows_product` for a weight of a layout."""
        return 1 if layout == unpack.HALF.value else self.num_warps


# Programs of wide tiles that keep the multiprocessors busy; below, tiles are narrow and there are more of them.
_WIDE_PROGRAMS = 90
# Outputs from which there are more programs of 16 outputs than an H200 holds at once, three on a multiprocessor.
_MANY_OUTPUTS = 6400
# What was measured to be quicker on an H200 than `_usual`: by format of `unpack`, whether the weight has many outputs,
# and rows of a tile. An entry that is taken out gives the usual tile.
MEASURED: dict[tuple[int, bool, int], RowsConfig] = {}


def configure(
    outputs: int, layout: int, dtype: torch.dtype, tile_rows: int, arch: int, *, gated: bool = False
) -> RowsConfig:
    """The tile for a weight of so many outputs, by its format of `unpack` and the rows of a tile. If `gated`, half of
    the outputs are gates, and half of a tile's."""
    measured = MEASURED.get((layout, outputs >= _MANY_OUTPUTS, tile_rows))
    if arch == 90 and dtype != torch.float32 and measured is not None:
        return measured
    if not gated:
        return _usual(outputs, layout, dtype, tile_rows, arch)
    half = _usual(outputs // 2, layout, dtype, tile_rows, arch)
    return half._replace(block_n=2 * half.block_n)


def _usual(outputs: int, layout: int, dtype: torch.dtype, tile_rows: int, arch: int) -> RowsConfig:
    if layout == unpack.HALF.value:
        if arch == 0 or dtype == torch.float32:  # exact products run on the ordinary units: operands sit in registers
            return RowsConfig(16, 64, 4, 2)
        stages = 5 if 90 <= arch < 120 else 3
        wide = RowsConfig(64, 128, 4, stages)
        return wide if cdiv(outputs, wide.block_n) >= _WIDE_PROGRAMS else RowsConfig(16, 256, 2, stages)
    if arch == 0 or dtype == torch.float32:
        return RowsConfig(16, 256, 2, 2)
    # Narrow tiles and few warps: a program waits for all its warps in every turn.
    if tile_rows < MAX_ROWS:
        return RowsConfig(16, 512, 4, 4 if arch in (90, 100) else 3)
    return RowsConfig(32, 512, 4, 3) if arch in (80, 90, 100) else RowsConfig(16, 512, 4, 2)  # others have 99 KB
