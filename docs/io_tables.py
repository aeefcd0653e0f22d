"""Write the tables of docs/io-model.md from `longreach_kernels.analysis.io_model`.

    python docs/io_tables.py            # writes the page
    python docs/io_tables.py --check    # changes nothing, fails if the page is not what the model says

A table goes between the markers `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import generated_page
from longreach_kernels.analysis.io_model import (
    Tiles,
    flash1,
    flash1_backward,
    flash1_tiles,
    flash2,
    lower_bound,
    standard,
    standard_backward,
)

PAGE = Path(__file__).resolve().parent / "io-model.md"
LENGTHS = [1024 << i for i in range(7)]
HEAD_DIMS = (64, 128)
MEMORIES = (192, 227)  # KB on chip
KERNEL = Tiles(128, 128)
PAPER = {"standard": "40.3", "FlashAttention-1": "4.4"}  # Dao et al. 2022, figure 2, left
SHARE = 8  # block-sparse visits one tile in so many


def flash2_tiles(d: int, sram: int) -> Tiles:
    """FlashAttention-1's choice mirrored: what stays on chip gets the long tile."""
    tiles = flash1_tiles(d, sram)
    return Tiles(rows=tiles.columns, columns=tiles.rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f}"


def traffic_table(d: int) -> str:
    """Megabytes by algorithm and length."""
    kernel, tile = f"FA2 {KERNEL.rows}×{KERNEL.columns}", KERNEL.rows * KERNEL.columns
    head = ["N", "standard", *(f"FA1 {kb} KB" for kb in MEMORIES), *(f"FA2 {kb} KB" for kb in MEMORIES)]
    head += [kernel, f"{kernel}, s = 1/{SHARE}", "Q, K, V, O once"]
    rows = []
    for n in LENGTHS:
        moved = [standard(n, d).total]
        moved += [flash1(n, d, flash1_tiles(d, kb << 10)).total for kb in MEMORIES]
        moved += [flash2(n, d, flash2_tiles(d, kb << 10)).total for kb in MEMORIES]
        moved += [flash2(n, d, KERNEL).total, flash2(n, d, KERNEL, visited=n * n // tile // SHARE).total]
        moved += [lower_bound(n, d, MEMORIES[0] << 10)]
        rows.append([f"{n // 1024}K", *map(_megabytes, moved)])
    return _markdown(head, rows)


def gain_table() -> str:
    """Tiles and gains over standard attention at the longest length."""
    head = ["d", "on chip", "long tile", "short tile", "M / 3d²", "FA1 gains", "M / 2d²", "FA2 gains"]
    rows, n = [], LENGTHS[-1]
    for d in HEAD_DIMS:
        for kb in MEMORIES:
            tiles, elements = flash1_tiles(d, kb << 10), (kb << 10) // 2
            gains = [
                elements / (3 * d * d),
                standard(n, d).total / flash1(n, d, tiles).total,
                elements / (2 * d * d),
                standard(n, d).total / flash2(n, d, flash2_tiles(d, kb << 10)).total,
            ]
            sizes = [str(d), f"{kb} KB", str(tiles.columns), str(tiles.rows)]
            rows.append(sizes + [f"{gain:.2f}" for gain in gains])
    return _markdown(head, rows)


def trap_table() -> str:
    """Standard attention's bytes over FA2's by query tile: below 1, FA2 loses."""
    row_counts, n = [8 << i for i in range(6)], LENGTHS[-1]
    rows = []
    for d in HEAD_DIMS:
        gains = [standard(n, d).total / flash2(n, d, Tiles(r, KERNEL.columns)).total for r in row_counts]
        rows.append([str(d), *(f"{gain:.2f}" for gain in gains)])
    return _markdown(["d", *(f"B_r = {r}" for r in row_counts)], rows)


def paper_table() -> str:
    """Figure 2 of the FlashAttention paper: GPT-2 medium, forward and backward, 64 sequences of 16 heads."""
    n, d, heads, tiles = 1024, 64, 64 * 16, flash1_tiles(64, 192 << 10)
    counted = {
        "standard": standard(n, d).total + standard_backward(n, d).total,
        "FlashAttention-1": flash1(n, d, tiles).total + flash1_backward(n, d, tiles).total,
    }
    rows = [[name, f"{heads * count / 1e9:.1f}", PAPER[name]] for name, count in counted.items()]
    return _markdown(["", "this model (GB)", "the paper's measurement (GB)"], rows)


def passes_table() -> str:
    """FlashAttention-1, forward, the same heads: gigabytes by the size of the key tile."""
    n, d, heads = 1024, 64, 64 * 16
    columns = (64, 128, 256, 512)
    moved = [f"{heads * flash1(n, d, Tiles(min(c, d), c)).total / 1e9:.2f}" for c in columns]
    return _markdown(["B_c", *map(str, columns)], [["GB", *moved]])


TABLES: dict[str, Callable[[], str]] = {
    **{f"traffic-{d}": lambda d=d: traffic_table(d) for d in HEAD_DIMS},
    "gain": gain_table,
    "trap": trap_table,
    "paper": paper_table,
    "passes": passes_table,
}

_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(page: str) -> str:
    """The page with every table made anew.

    Raises:
        ValueError: the page's markers are not one for each table.
    """
    marked = [name for _, name, _ in _MARKED.findall(page)]
    if sorted(marked) != sorted(TABLES):
        raise ValueError(f"page: needs one pair of markers for each of {sorted(TABLES)}, has {sorted(marked)}")
    return _MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[3]}", page)


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the IO model says")


if __name__ == "__main__":
    main()
