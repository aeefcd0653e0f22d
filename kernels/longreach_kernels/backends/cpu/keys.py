"""The keys and values of one sequence, wherever they lie."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

# Runs of consecutive pages are read in place, one call each; beyond this many the pages are copied together first.
_MAX_RUNS = 8


class SequenceKeys:
    """The keys and values of one sequence inside tensors of rows (rows, Hkv, D), in runs of consecutive rows."""

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        length: int,
        starts: Sequence[int] = (0,),
        rows: Sequence[int] = (0,),
        scales: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.k, self.v, self.length = k, v, length
        self.scales = scales  # (Hkv,) factors of 8-bit keys and values, which `slices` gives in ``dtype``
        self.dtype = dtype
        self.starts = starts  # position of the first key of each run, ascending
        self.rows = rows  # the row where it lies

    def slices(self, start: int, end: int) -> list[tuple[int, int, Tensor, Tensor]]:
        """Cover the keys ``start <= key < end`` by (start, end, k, v), with k and v views (Hkv, n, D)."""
        first = bisect_right(self.starts, start) - 1
        last = bisect_left(self.starts, end)
        if last - first > _MAX_RUNS:
            stops = [*self.starts[first + 1 : last], end]
            spans = [
                torch.arange(row, row + stop - position)
                for position, row, stop in zip(self.starts[first:last], self.rows[first:last], stops, strict=True)
            ]
            index = torch.cat(spans)[start - self.starts[first] :]
            pieces = [(start, end, self.k.index_select(0, index), self.v.index_select(0, index))]
        else:
            pieces = []
            for run in range(first, last):
                a, b = max(start, self.starts[run]), end if run + 1 == len(self.starts) else self.starts[run + 1]
                b = min(b, end)
                row = self.rows[run] + a - self.starts[run]
                pieces.append((a, b, self.k[row : row + b - a], self.v[row : row + b - a]))
        if self.scales is not None:
            k_scale, v_scale = (x.to(self.dtype)[:, None] for x in self.scales)
            pieces = [(a, b, k.to(self.dtype) * k_scale, v.to(self.dtype) * v_scale) for a, b, k, v in pieces]
        return [(a, b, k.transpose(0, 1), v.transpose(0, 1)) for a, b, k, v in pieces]
