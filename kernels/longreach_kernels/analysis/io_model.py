"""The IO model: bytes that attention moves between HBM and on-chip memory, by algorithm, to the byte.

One head, no mask or whole skipped tiles, N queries and keys, d channels, elements of ``itemsize`` bytes, on-chip memory
of ``sram`` bytes. Counts are of the algorithms as published (each load and store statement of their pseudo-code),
without caches:

- standard attention (Dao et al. 2022, algorithm 0) writes S and P to HBM: Theta(N d + N^2);
- FlashAttention-1 (Dao et al. 2022, algorithm 1): K/V tiles outside, Q tiles inside, O, l and m pass through HBM once
  for each K/V tile: Theta(N^2 d^2 / M) for d <= M <= N d;
- FlashAttention-2 (Dao 2023, algorithm 1): Q tiles outside, K and V pass once for each Q tile, O and L go out once;
- block-sparse FlashAttention-1 (Dao et al. 2022, section 3.3): Theta(N d + s N^2 d^2 / M) for a share s of tiles.

`longreach_kernels.analysis.io_simulation` runs FlashAttention-1 in PyTorch, loop for loop, and counts what it reads and
writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to HBM."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.read + self.written


@dataclass(frozen=True)
class Tiles:
    """Tile sizes: ``rows`` of Q and O (B_r of the papers), ``columns`` of K and V (B_c)."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"rows, columns: must be at least 1, got {self.rows} and {self.columns}")


def flash1_tiles(d: int, sram: int, itemsize: int = 2) -> Tiles:
    """FlashAttention-1's choice: ``B_c = ceil(M / 4d)``, ``B_r = min(B_c, d)``, M in elements.

    Raises:
        ValueError: fewer than 4 d elements fit.
    """
    elements = sram // itemsize
    if elements < 4 * d:
        raise ValueError(f"sram: FlashAttention needs 4 d = {4 * d} elements on chip, {sram} bytes hold {elements}")
    columns = math.ceil(elements / (4 * d))
    return Tiles(min(columns, d), columns)


def _lengths(n: int, tile: int) -> list[int]:
    return [min(tile, n - start) for start in range(0, n, tile)]


def standard(n: int, d: int, *, itemsize: int = 2) -> Traffic:
    """Standard attention, forward: read Q, K, write S; read S, write P; read P, V, write O."""
    return Traffic(read=itemsize * (3 * n * d + 2 * n * n), written=itemsize * (2 * n * n + n * d))


def standard_backward(n: int, d: int, *, itemsize: int = 2) -> Traffic:
    """Standard attention, backward (Dao et al. 2022, algorithm 3): dV from P and dO; dP from dO and V; dS from P and
    dP; dQ from dS and K; dK from dS and Q."""
    read = (n * n + n * d) + (2 * n * d) + (2 * n * n) + (n * n + n * d) + (n * n + n * d)
    written = n * d + n * n + n * n + n * d + n * d
    return Traffic(itemsize * read, itemsize * written)


def flash1(n: int, d: int, tiles: Tiles, *, itemsize: int = 2, visited: int | None = None) -> Traffic:
    """FlashAttention-1, forward. Statistics l and m have ``itemsize`` too.

    Args:
        visited: for block sparsity, pairs of tiles that are computed, all of whole tiles; None visits all. The initial
            write of O, l and m is counted, as the algorithm has it.
    """
    initial = n * d + 2 * n
    once = 2 * n * d  # K and V, one tile at a time
    if visited is None:
        passes = len(_lengths(n, tiles.columns))
        inner_read, inner_written = passes * (2 * n * d + 2 * n), passes * (n * d + 2 * n)
    else:
        inner_read = visited * tiles.rows * (2 * d + 2)
        inner_written = visited * tiles.rows * (d + 2)
    return Traffic(itemsize * (once + inner_read), itemsize * (initial + inner_written))


def flash1_backward(n: int, d: int, tiles: Tiles, *, itemsize: int = 2) -> Traffic:
    """FlashAttention-1, backward (algorithm 4): for each K/V tile, read Q, O, dO, dQ, l, m of every Q tile and write
    dQ; write dK and dV once. dQ, dK and dV are set to 0 in HBM first."""
    passes = len(_lengths(n, tiles.columns))
    read = 2 * n * d + passes * (4 * n * d + 2 * n)
    written = 3 * n * d + passes * n * d + 2 * n * d
    return Traffic(itemsize * read, itemsize * written)


def flash2(n: int, d: int, tiles: Tiles, *, itemsize: int = 2, visited: int | None = None) -> Traffic:
    """FlashAttention-2, forward: each Q tile is read once, walks the K/V tiles, and writes O and L once.

    Args:
        visited: pairs of whole tiles that are computed; None visits all.
    """
    if visited is None:
        walked = len(_lengths(n, tiles.rows)) * 2 * n * d
    else:
        walked = visited * tiles.columns * 2 * d
    return Traffic(itemsize * (n * d + walked), itemsize * (n * d + n))


def flash2_backward(n: int, d: int, tiles_kv: Tiles, tiles_q: Tiles, *, itemsize: int = 2) -> Traffic:
    """The backward pass of `longreach_kernels.backends.triton`, one kernel for dK and dV and one for dQ, after
    one that makes delta: no tile of a gradient passes through HBM twice.

    Args:
        tiles_kv, tiles_q: tile sizes of the dK/dV kernel and of the dQ kernel.
    """
    delta_read, delta_written = 2 * n * d, n
    kv_read = 2 * n * d + len(_lengths(n, tiles_kv.columns)) * (2 * n * d + 2 * n)
    q_read = 2 * n * d + 2 * n + len(_lengths(n, tiles_q.rows)) * 2 * n * d
    return Traffic(itemsize * (delta_read + kv_read + q_read), itemsize * (delta_written + 3 * n * d))


def lower_bound(n: int, d: int, sram: int, *, itemsize: int = 2) -> int:
    """Bytes that any exact algorithm moves at least: Q, K, V in and O out. For M = Theta(N d) this is also what
    FlashAttention moves, so no exact algorithm is asymptotically better for every M between d and N d (Dao et al.
    2022, proposition 3)."""
    if sram < itemsize * d:
        raise ValueError(f"sram: must hold a row of {d} elements, got {sram} bytes")
    return itemsize * 4 * n * d
