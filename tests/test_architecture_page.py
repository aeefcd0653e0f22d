"""The maps name files and rooms that exist, and every room is on the map."""

import re
from pathlib import Path

import pytest

from tests.documented import ROOT

FLOORS = tuple(
    ROOT / floor for floor in ("server/longreach", "kernels/longreach_kernels", "model_patches/longreach_patches")
)
PAGES = ("docs/architecture.md", "docs/life-of-a-request.md", "CONTRIBUTING.md")
# In `code`: a path with a folder, a folder, or a Python file.
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/|(?:[\w.-]+/)*[\w-]+\.(?:py|md|json|lock)|(?:[\w.-]+/)+[\w.-]+)[`: ]")
_DRAWN = re.compile(r"(?<![\w/])((?:[a-z_]+/)+(?:[a-z_]+\.py)?)(?![\w/])")
_MADE = {"site/", "errors.py"}  # the built documentation; a file that every floor has


def named(page: str) -> list[str]:
    """The paths that a page names, in its text and in its drawings."""
    text = (ROOT / page).read_text()
    drawings = "\n".join(re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return sorted({*_PATH.findall(text), *_DRAWN.findall(drawings)} - _MADE)


def rooms() -> list[str]:
    """The packages below the floors that have Python files, as the map names them."""
    folders = [path.parent for floor in FLOORS for path in floor.rglob("__init__.py") if path.parent != floor]
    floor_of = {folder: floor for folder in folders for floor in FLOORS if folder.is_relative_to(floor)}
    return sorted({f"{folder.relative_to(floor)}/" for folder, floor in floor_of.items()})


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page: str) -> None:
    paths = named(page)
    assert len(paths) > 30
    missing = [path for path in paths if not any((base / path).exists() for base in (ROOT, *FLOORS))]
    assert missing == [], f"{page} names what is not there"


def test_every_room_is_on_the_map() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [room for room in rooms() if f"`{room}`" not in page] == [], "add the room to the map of CONTRIBUTING.md"


def test_every_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = set(re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert "test" in asked
    assert asked <= targets


def test_what_is_looked_for_most_is_found() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Where is\n")[2]
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE))
    sought = ("preemption", "chunk size", "sparse decode", "fp8 calibration", "SSE framing", "CUDA graphs", "warm-up")
    assert [name for name in (*sought, "`longreach plan`") if not re.search(r"`[\w/]+\.py`", rows.get(name, ""))] == []


def test_a_path_is_read_in_text_and_in_drawings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_architecture_page.ROOT", tmp_path)
    (tmp_path / "a.md").write_text(
        "In `one/two.py` and `rooms/`.\n```text\nbox   drawn/here/\n```\n`python docs/x.py`\n"
    )
    assert named("a.md") == ["drawn/here/", "one/two.py", "rooms/"]
