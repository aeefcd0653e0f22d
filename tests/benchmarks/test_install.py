"""What `benchmarks/install.py` counts, and the table of it."""

from __future__ import annotations

from pathlib import Path

from benchmarks import install


def test_links_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(1_500_000))
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    assert install.megabytes(tmp_path) == 1.5


def test_a_row_says_where_how_much_how_long_and_the_answer() -> None:
    first, again = ({"ready_s": seconds, "answered_s": seconds, "answer": "48213"} for seconds in (61.4, 7.5))
    row = {"label": "Debian 12", "packages": 50, "venv_mb": 1012.3, "first": first, "again": again}
    row |= {"python": "3.11.2", "torch": "2.13.0+cpu"}
    lines = install.table({"rows": [row], "conditions": "Two cores."}).splitlines()
    assert lines[2] == "| Debian 12 | 50 | 1,012 | 61 | 8 | 48213 |"
    assert lines[-1] == "Debian 12: Python 3.11.2, torch 2.13.0+cpu. Two cores."
