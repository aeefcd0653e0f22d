"""The commands that the documentation shows, those in fenced blocks of shell; and the scripts that write its pages."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *(ROOT / "training" / "README.md", ROOT / "server" / "longreach" / "default_model" / "README.md"),
)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(^|\s+)#\s.*$")
_HERE = re.compile(r"<<'(\w+)'")


@dataclass(frozen=True)
class Command:
    """One command of a page, its continued lines and its here-document in one text."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0][:70]}"


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in some languages."""
    return [body for language, body in _FENCE.findall(page.read_text()) if language in languages]


def commands() -> list[Command]:
    """All commands of all pages, without comments."""
    found: list[Command] = []
    for page in PAGES:
        for block in blocks(page, "bash", "sh", "shell", "console"):
            found += [Command(str(page.relative_to(ROOT)), text) for text in split(block)]
    return found


def split(block: str) -> list[str]:
    """The commands of a block of shell."""
    found, pending, end = [], "", ""
    for line in block.splitlines():
        if end:
            pending += line + "\n"
            if line == end:
                found.append(pending)
                pending = end = ""
            continue
        line = _COMMENT.sub("", line)
        if line.endswith("\\"):
            pending += line[:-1]
        elif (pending + line).count("'") % 2:
            pending += line + "\n"
        elif here := _HERE.search(line):
            pending, end = pending + line + "\n", here[1]
        elif (pending + line).strip():
            found.append((pending + line).strip())
            pending = ""
    assert not pending, f"a command has no end: {pending!r}"
    return found


def script(folder: str, name: str) -> ModuleType:
    """The module of a script, imported as when it is run: its folder, below the repository's root, comes first."""
    sys.path.insert(0, str(ROOT / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / folder))
