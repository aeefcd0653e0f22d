"""The check of the documentation's sentences finds those that are hard to read, and no others."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.documented import ROOT, script

LONG = "One " + "word and " * 16 + "an end."


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return script("scripts", "hard_sentences")


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (LONG, ["35 words"]),
        (f"Short.\n\n- An item of a list.\n- {LONG}\n  It goes on.", ["35 words"]),
        ("What waits takes memory.", ["no noun as its subject"]),
        ("What waits? *What does it take?*", []),
        (f"```text\n{LONG}\n```\n\n| {LONG} |\n", []),
        (f"<!-- results: x -->\n\n{LONG}\n\n<!-- end -->\nBehind it.", []),
        ("`" + "a " * 40 + "` is code, and so is [a link](" + "long-" * 40 + ".md).", []),
        ("A half. vLLM has " + "twenty " * 20 + "words. cuDNN has " + "ten " * 10 + "words.", []),
        ("Dao et al. wrote " + "many " * 20 + "words.", []),
    ],
)
def test_hard_sentences_are_found(check: ModuleType, tmp_path: Path, text: str, faults: list[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A title\n\n{text}\n")
    assert [fault for _, fault, _ in check.faults(page)] == faults


def test_a_fault_is_told_with_its_line(check: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A title\n\n```\nx\n```\nShort.\n\nAnother\nparagraph. {LONG}\n")
    assert [line for line, _, _ in check.faults(page)] == [8]


def test_what_users_read_is_checked(check: ModuleType) -> None:
    names = [str(page.relative_to(ROOT)) for page in check.pages()]
    assert {"README.md", "docs/api.md", "docs/quick-start.md"} <= set(names)
    assert not [name for name in names if "/adr/" in name]
