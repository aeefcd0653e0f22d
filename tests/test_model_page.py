"""The tables of docs/models.md are what the table of families says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from longreach_patches.families import FAMILIES, LEFT_OUT

from tests.documented import ROOT, script


def test_a_family_written_by_hand_is_caught_and_put_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model_tables = script("docs", "model_tables")
    page = (ROOT / "docs" / "models.md").read_text()
    assert model_tables.render(page) == page, "run docs/model_tables.py"
    copy = tmp_path / "models.md"
    monkeypatch.setattr(model_tables, "PAGE", copy)
    copy.write_text(page.replace("| `gemma2` |", "| `gemma9` |"))
    monkeypatch.setattr(sys, "argv", ["model_tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"is not what the table of families says; run docs/model_tables\.py"):
        model_tables.main()
    monkeypatch.setattr(sys, "argv", ["model_tables.py"])
    model_tables.main()
    assert copy.read_text() == page
    with pytest.raises(ValueError, match="needs the lines"):
        model_tables.render("no marker")


def test_no_family_is_served_and_left_out() -> None:
    assert not FAMILIES.keys() & LEFT_OUT.keys()
