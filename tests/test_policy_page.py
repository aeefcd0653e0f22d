"""The table of docs/attention-policies.md is what the policies' schema says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.documented import ROOT, script


def test_a_default_written_by_hand_is_caught_and_put_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy_tables = script("docs", "policy_tables")
    page = (ROOT / "docs" / "attention-policies.md").read_text()
    assert policy_tables.render(page) == page, "run docs/policy_tables.py"
    copy = tmp_path / "attention-policies.md"
    monkeypatch.setattr(policy_tables, "PAGE", copy)
    copy.write_text(page.replace("| `4096` |", "| `4097` |"))
    monkeypatch.setattr(sys, "argv", ["policy_tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"is not what the schema says; run docs/policy_tables\.py"):
        policy_tables.main()
    monkeypatch.setattr(sys, "argv", ["policy_tables.py"])
    policy_tables.main()
    assert copy.read_text() == page
    with pytest.raises(ValueError, match="needs the lines"):
        policy_tables.render("no marker")
