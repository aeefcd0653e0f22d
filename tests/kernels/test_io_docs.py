"""The tables of docs/io-model.md are what the IO model says."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from longreach_kernels.analysis.io_model import Tiles, flash1, flash2, standard

from tests.documented import script

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def io_tables() -> ModuleType:
    return script("docs", "io_tables")


def run(io_tables: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["io_tables.py", *arguments])
    io_tables.main()


def test_the_page_is_what_the_model_says(io_tables, monkeypatch):
    run(io_tables, monkeypatch, "--check")


def test_a_number_written_by_hand_is_caught_and_put_right(io_tables, monkeypatch, tmp_path):
    page = (DOCS / "io-model.md").read_text()
    number = f"{standard(65536, 64).total / 1e6:,.1f}"
    assert page.count(number) == 1
    monkeypatch.setattr(io_tables, "PAGE", tmp_path / "io-model.md")
    io_tables.PAGE.write_text(page.replace(number, "1.0"))
    with pytest.raises(SystemExit, match=r"run docs/io_tables\.py"):
        run(io_tables, monkeypatch, "--check")
    run(io_tables, monkeypatch)
    assert io_tables.PAGE.read_text() == page


def test_a_lost_marker_is_named(io_tables):
    page = (DOCS / "io-model.md").read_text()
    with pytest.raises(ValueError, match=r"^page: .*'trap'"):
        io_tables.render(page.replace("<!-- table: trap -->", ""))


@pytest.mark.parametrize(("d", "kb"), [(64, 192), (64, 227), (128, 192), (128, 227)])
def test_the_mirrored_tiles_gain_what_the_page_derives(io_tables, d, kb):
    tiles = io_tables.flash2_tiles(d, kb << 10)
    assert tiles.rows >= tiles.columns
    gain = standard(65536, d).total / flash2(65536, d, tiles).total
    assert gain == pytest.approx((kb << 10) / 2 / (2 * d * d), rel=0.02)


def test_the_tiles_of_kernels_fit(io_tables):
    tiles, d = io_tables.KERNEL, max(io_tables.HEAD_DIMS)
    elements = 2 * (tiles.rows + tiles.columns) * d  # Q and O, K and V
    assert elements * 2 <= min(io_tables.MEMORIES) << 10


@pytest.mark.parametrize("d", [64, 128])
def test_the_closed_forms_of_the_page(d):
    n, rows, columns = 16384, 64, 256
    tiles = Tiles(rows, columns)
    assert standard(n, d, itemsize=1).total == 4 * n * n + 4 * n * d
    assert flash1(n, d, tiles, itemsize=1).total == n // columns * (3 * n * d + 4 * n) + 3 * n * d + 2 * n
    assert flash1(n, d, Tiles(rows, n), itemsize=1).total == 6 * n * d + 6 * n
    assert flash2(n, d, tiles, itemsize=1).total == 2 * n * n * d // rows + 2 * n * d + n
    # Where the quadratic terms alone are equal to standard attention's: FA2 at d / 2, FA1 a row above 3 d / 4.
    assert flash2(n, d, Tiles(d // 2 - 1, columns)).total > standard(n, d).total > flash2(n, d, Tiles(d, columns)).total
    limit = 3 * d // 4
    assert flash1(n, d, Tiles(rows, limit)).total > standard(n, d).total > flash1(n, d, Tiles(rows, limit + 2)).total
