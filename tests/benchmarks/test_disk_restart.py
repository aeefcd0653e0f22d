"""What `benchmarks/disk_restart.py` makes of a drive's files and of its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import disk_restart


@pytest.mark.unit
def test_only_files_of_entries_are_read_for_the_speed_of_the_drive(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"1")
    entry = tmp_path / "namespace" / "00" / "entry"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(bytes(1 << 20))
    assert disk_restart.files(tmp_path) == [entry]
    assert disk_restart.drive_speed([entry]) > 0


@pytest.mark.unit
def test_the_table_sets_restarts_beside_the_first_reading() -> None:
    restart = {"of_first": 0.25, "ttft_s": 2.5, "cached": 0.996, "answers": 8, "longest_gap_s": 0.045}
    result = {
        "environment": {"device": "GPU", "versions": {"torch": "2"}, "date": "2026-01-01"},
        "model": {"shape": "llama-8b"},
        "tokens": 130048,
        "drive_bytes_per_s": 5e9,
        "first": {"ttft_s": 10.0, "written_s": 18.0, "written_bytes": 16 << 30},
        "restarts": [{"files": "drive", **restart}, {"files": "memory", **restart}],
    }
    lines = disk_restart.table(result).splitlines()
    assert lines[2] == "| read for the first time | 10.00 |  |  |  |"
    assert lines[3] == "| after a restart, files in the drive alone | 2.50 | 0.25 | 99.6% | 45 |"
    assert lines[4].startswith("| after a restart, files in memory |")
    assert "16.0 GiB, written 18.0 s after the question; the drive reads 5.00 GB/s; 8 running answers" in lines[6]
