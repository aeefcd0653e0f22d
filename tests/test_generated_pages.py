"""The tables of pages that are written from data are what the data says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from longreach_patches.families import FAMILIES, LEFT_OUT

from tests.documented import ROOT, script

# A script, its page, a cell of the page and another in its place, and what the page follows.
PAGES = [
    ("policy_tables", "attention-policies.md", ("| `4096` |", "| `4097` |"), "the schema says"),
    ("client_tables", "clients.md", ("| LlamaIndex |", "| Llama |"), "the results say"),
    ("call_tables", "tool-calls.md", ("| `glm` |", "| `glm9` |"), "the server reads"),
    ("model_tables", "models.md", ("| `gemma2` |", "| `gemma9` |"), "the table of families says"),
    ("state_tables", "caches.md", ("| 73.7 MiB |", "| 73.8 MiB |"), "the models' shapes give"),
    ("settings_tables", "settings.md", ("| `8000` |", "| `8001` |"), "the settings say"),
    ("command_tables", "command-line.md", ("| `128k` |", "| `129k` |"), "the commands say"),
    ("disk_tables", "caches.md", ("| 11.1 GiB |", "| 48.0 GiB |"), "the models' shapes give"),
    ("error_tables", "errors.md", ("| `slow_reader` |", "| `slow_writer` |"), "the server's source says"),
    ("metrics_tables", "metrics.md", ("| `longreach:kv_pages` |", "| `longreach:kv_pads` |"), "the server registers"),
    ("window_tables", "windows.md", ("| 1,024 |", "| 1,025 |"), "the models' shapes give"),
]


@pytest.mark.parametrize(("name", "page", "cells", "says"), PAGES)
def test_what_was_written_by_hand_is_caught_and_put_right(
    name: str, page: str, cells: tuple[str, str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tables = script("docs", name)
    text = (ROOT / "docs" / page).read_text()
    assert tables.render(text) == text, f"run docs/{name}.py"
    copy = tmp_path / page
    monkeypatch.setattr(tables, "PAGE", copy)
    copy.write_text(text.replace(*cells))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--check"])
    with pytest.raises(SystemExit, match=rf"is not what {says}; run docs/{name}\.py"):
        tables.main()
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    tables.main()
    assert copy.read_text() == text
    with pytest.raises(ValueError, match="needs the lines"):
        tables.render("no marker")


def test_no_family_is_served_and_left_out() -> None:
    assert not FAMILIES.keys() & LEFT_OUT.keys()
