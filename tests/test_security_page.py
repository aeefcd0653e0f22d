"""Every promise of SECURITY.md names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "SECURITY.md").read_text()
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / "tests" / "server" / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_names_one() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    promises = [row for row in rows if row.count("|") == 3]
    assert len(promises) > 25
    assert [row for row in promises if "::" not in row] == []
