"""The playground's files over HTTP: what they are, who may load them, and what they may load."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from longreach.api.endpoints.playground import FOLDER, page_files

from tests.server.api.conftest import LiveServer

FILES = sorted(page_files())


def test_the_page_and_all_that_it_names_are_served(server: LiveServer) -> None:
    page = server.http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="(playground/[^"]+)"', page.text))
    assert {"playground/main.js", "playground/style.css", "playground/icon.svg"} <= named
    for module in FOLDER.glob("*.js"):
        named |= {f"playground/{name}" for name in re.findall(r'from "\./([^"]+)"', module.read_text())}
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    for path in named:
        answer = server.http.get(f"/{path}")
        assert answer.status_code == 200, path
        assert answer.headers["content-type"] == kinds[Path(path).suffix]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert {f"/{path}" for path in named} | {"/"} == set(FILES), "a file that nothing names"


def test_a_file_that_has_not_changed_is_not_sent_again(server: LiveServer) -> None:
    for path in FILES:
        first = server.http.get(path)
        assert first.headers["cache-control"] == "no-cache"
        etag = first.headers["etag"]
        for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            again = server.http.get(path, headers={"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        other = server.http.get(path, headers={"If-None-Match": '"other"'})
        assert (other.status_code, other.content) == (200, first.content)


def test_etags_follow_contents(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("one")
    (tmp_path / "notes.txt").write_text("not of the page")
    before = page_files(tmp_path)
    (tmp_path / "index.html").write_text("two")
    after = page_files(tmp_path)
    assert set(before) == {"/"}
    assert before["/"].etag != after["/"].etag


def test_the_page_may_load_from_its_own_server_only(server: LiveServer) -> None:
    page = server.http.get("/")
    rules = dict(rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[kind] for kind in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert {rules[kind] for kind in ("frame-ancestors", "base-uri", "form-action")} == {"'none'"}
    for path in FILES:
        text = server.http.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|\bstyle=|\bon[a-z]+=|<script>|innerHTML|\beval\(", text), path


def test_the_wheel_holds_every_file(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for path in FOLDER.iterdir():
            assert archive.read(f"longreach/playground/{path.name}") == path.read_bytes()


def test_head_answers_as_get_without_the_body(server: LiveServer) -> None:
    get, head = server.http.get("/"), server.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-length", "content-type", "etag", "content-security-policy"):
        assert head.headers[name] == get.headers[name]
    assert server.http.post("/").status_code == 405


def test_the_page_needs_no_key_and_gives_none_away(make_server: Callable[..., LiveServer]) -> None:
    with make_server(api_key="a-secret-key") as server:
        for path in FILES:
            assert server.http.get(path).status_code == 200
        for path in ("/playground", "/playground/", "/playground/none.js", "/playground/../v1/models", "/v1/models"):
            assert server.http.get(path).status_code == 401, path


def test_it_can_be_switched_off(make_server: Callable[..., LiveServer]) -> None:
    with make_server(playground=False) as server:
        for path in FILES:
            assert server.http.get(path).json()["error"]["code"] == "not_found"
    with make_server(playground=False, api_key="a-secret-key") as server:
        assert server.http.get("/").status_code == 401
