"""Every decision record has a status and a date, and the index of docs/adr says what the records say."""

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.documented import ROOT, script

RECORD = "0001-reservation-instead-of-preemption.md"


@pytest.fixture(scope="module")
def adr_index() -> ModuleType:
    return script("docs", "adr_index")


@pytest.fixture
def copy(adr_index: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docs" / "adr", tmp_path / "adr")
    monkeypatch.setattr(adr_index, "PAGE", tmp_path / "adr" / "README.md")
    return tmp_path / "adr"


def run(adr_index: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["adr_index.py", *arguments])
    adr_index.main()


def test_the_index_is_what_the_records_say(adr_index, monkeypatch):
    run(adr_index, monkeypatch, "--check")


def test_a_changed_status_is_caught_and_put_into_the_index(adr_index, monkeypatch, copy):
    record = copy / "0002-one-socket-pair-and-messagepack.md"
    record.write_text(record.read_text().replace("- Status: accepted", "- Status: withdrawn"))
    with pytest.raises(SystemExit, match=r"run docs/adr_index\.py"):
        run(adr_index, monkeypatch, "--check")
    run(adr_index, monkeypatch)
    assert "(0002-one-socket-pair-and-messagepack.md) | withdrawn |" in adr_index.PAGE.read_text()


@pytest.mark.parametrize(
    ("now", "broken", "said"),
    [
        ("- Status: ", "Status: ", "must begin with"),
        ("- Date: 2026-11-21\n", "", "must begin with"),
        ("2026-11-21", "21 November", "must begin with"),
        ("2026-11-21", "2026-13-21", "write it as YYYY-MM-DD"),
        ("superseded by", "outdated by", "begin it with one of"),
        ("[8](0008-preempted-at-most-once.md)", "[8](0008.md)", r"names 0008\.md, which does not exist"),
        (
            "[8](0008-preempted-at-most-once.md) (promises, preemption) and [6](0006-order-by-remaining-work.md)",
            "8",
            "link",
        ),
        ("# 1. ", "# 2. ", "has the number 2"),
        ("## Context", "**Context.**", "the format is"),
    ],
)
def test_a_record_in_another_format_is_refused(adr_index, monkeypatch, copy, now, broken, said):
    text = (copy / RECORD).read_text()
    assert now in text
    (copy / RECORD).write_text(text.replace(now, broken, 1))
    with pytest.raises(SystemExit, match=said):
        run(adr_index, monkeypatch, "--check")
