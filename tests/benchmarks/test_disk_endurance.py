"""What `benchmarks/disk_endurance.py` makes of a folder, of a sequence of questions, and of its figures."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import disk_endurance, file_watch

pytestmark = pytest.mark.unit


def test_only_files_count_that_were_there_at_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stays, goes = tmp_path / "a" / "stays", tmp_path / "a" / "goes"
    stays.parent.mkdir()
    for path in (stays, goes):
        path.write_bytes(bytes(100_000))
    blocks = 512 * stays.stat().st_blocks
    assert blocks >= 100_000
    assert file_watch.bytes_at_once(tmp_path) == 2 * blocks
    looked_at = file_watch._looked_at

    def looking(folder: Path) -> Iterable[tuple[Path, os.stat_result]]:
        found = list(looked_at(folder))
        goes.unlink(missing_ok=True)  # once it was seen, another one takes its room
        (tmp_path / "a" / "comes").write_bytes(bytes(100_000))
        return found

    monkeypatch.setattr(file_watch, "_looked_at", looking)
    assert file_watch.bytes_at_once(tmp_path) == blocks


def test_an_lru_keeps_what_was_used_last() -> None:
    lru = disk_endurance.Lru(2)
    for document in (1, 2, 1, 3, 1, 2):
        lru.use(document)
    assert lru.hits == 2


def test_the_table_tells_of_tiers_and_of_what_was_promised() -> None:
    tokens = {"gpu": 100, "host": 50, "disk": 150, "computed": 700}
    told = {"written_bytes": 12e9, "read_bytes": 3e9, "evicted": 5000, "refused": 0, "damaged": 0}
    seen = {
        "asked": 1234,
        "different": 90,
        "tokens": tokens,
        "lru_hits": 0.4,
        "failures": 0,
        "error_lines": [],
        "disk": told,
    }
    result = {
        "environment": {"device": "CPU", "versions": {"torch": "2"}, "date": "2026-01-01"},
        "model": {"shape": "wide-pages"},
        "disk_bytes": 10**9,
        "documents": 100,
        "document_bytes": 10**8,
        "seconds": 600.0,
        "clients": 3,
        "skew": 1.0,
        "endured": seen | {"most_bytes": 999_000_000, "looks": 5000},
    }
    lines = disk_endurance.table(result).splitlines()
    assert lines[2] == "| 1,234 | 10.0% | 5.0% | 15.0% | 70.0% | 40.0% |"
    assert "Of at most 1.000 GB, 0.999 were the most in 5,000 sums; 12.0 GB written" in lines[4]
    assert "Failed requests: 0; lines of errors: 0" in lines[4]
