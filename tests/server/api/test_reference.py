"""The reference for people says what the OpenAPI document says, on paper and on the server."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.documented import script
from tests.server.api.conftest import LiveServer


@pytest.fixture(scope="module")
def api_tables() -> ModuleType:
    return script("docs", "api_tables")


def test_a_page_that_is_not_current_is_caught_and_put_right(
    api_tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages = {page.name: page.read_text() for page in api_tables.pages()}
    assert api_tables.render(pages) == pages, "run docs/api_tables.py"
    copies = [tmp_path / name for name in pages]
    for copy, text in zip(copies, pages.values(), strict=True):
        copy.write_text(text.replace("| `min_p` |", "| `max_p` |"))
    monkeypatch.setattr(api_tables, "pages", lambda: copies)
    monkeypatch.setattr(sys, "argv", ["api_tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"^api-completions\.md.* not what .*run docs/api_tables\.py"):
        api_tables.main()
    monkeypatch.setattr(sys, "argv", ["api_tables.py"])
    api_tables.main()
    assert [copy.read_text() for copy in copies] == [*pages.values()]
    with pytest.raises(ValueError, match="needs the line"):
        api_tables.render({"api-server.md": "no marker"})
    with pytest.raises(ValueError, match="needs the lines"):
        api_tables.render({"api.md": "no marker"})


def test_an_object_stands_on_the_page_of_its_endpoints(api_tables: ModuleType) -> None:
    pages = {page.name: page.read_text() for page in api_tables.pages()}
    assert "| [ResponseFormat](#responseformat) |" in pages["api-completions.md"]
    assert "list of [Message](api-objects.md#message)" in pages["api-completions.md"]
    assert "](api-documents.md#post-v1files)" in pages["api.md"]
    headings = [line for page in pages.values() for line in page.splitlines() if line.startswith("## `")]
    assert len(headings) == len(set(headings)) > 50


def test_the_server_shows_it_without_anything_from_elsewhere(server: LiveServer) -> None:
    answer = server.http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for path in server.http.get("/openapi.json").json()["paths"]:
        assert f"{path}</code></h2>" in answer.text
    assert "<td><code>min_p</code><td>number, 0 to 1<td><code>null</code>" in answer.text
    assert "<h2 id='Message'><code>Message</code></h2>" in answer.text
    assert "list of <a href='#Message'>Message</a>" in answer.text
    assert "Send chunks with <code>prompt_progress</code>" in answer.text
    links = set(re.findall(r"href='#([^']+)'", answer.text))
    assert "POST-v1-completions" in links
    assert links <= set(re.findall(r"id='([^']+)'", answer.text))
    assert not re.search(r"https?:|<script|src=", answer.text)
    assert "<link rel=icon href='data:,'>" in answer.text, "browsers ask for /favicon.ico"
