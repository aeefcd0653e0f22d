"""The changelog has one line an item, known groups, and a section for the version of the package."""

import re
import tomllib

from tests.documented import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text()
_GROUPS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_every_item_is_one_short_line():
    lines = [line for line in TEXT.partition("## Unreleased\n")[2].splitlines() if line]
    assert [line for line in lines if not line.startswith(("- ", "#"))] == []
    assert [line for line in lines if len(line) > 120] == []
    items = [line for line in lines if line.startswith("- ")]
    assert len(items) == len(set(items)) > 100


def test_sections_and_groups_are_the_known_ones():
    sections = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert [name for name in sections[1:] if not re.fullmatch(r"\d+\.\d+\.\d+ - 2\d{3}-\d\d-\d\d", name)] == []
    assert set(re.findall(r"^### (.+)$", TEXT, re.MULTILINE)) <= _GROUPS


def test_the_packages_version_has_a_section():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## {version} - " in TEXT
