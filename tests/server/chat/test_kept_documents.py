"""The chat with a server that keeps documents, and with one that keeps none."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from longreach.documents.pdf_child import read_pdf

from tests.pdfs import pdf
from tests.server.chat.test_chat import FakeServer, chat

TEXT = "Grüße. Call me Ishmael."


class KeepingServer(FakeServer):
    """Keeps documents, two on a page of its lists."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: list[dict[str, Any]] = []
        self.received: list[bytes] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path, query = request.url.path, request.url.params
        if not path.startswith("/v1/documents"):
            return super().__call__(request)
        if request.method == "POST":
            self.received.append(request.read())
            assert request.headers["content-type"] == "text/plain"
            return httpx2.Response(
                201, json=self.keep(query["name"], self.received[-1].decode("utf-8-sig"), tokens=None)
            )
        found = [one for one in self.documents if query.get("name") in (None, one["name"])]
        if path == "/v1/documents":
            after = next((n + 1 for n, one in enumerate(found) if one["id"] == query.get("after")), 0)
            page = found[after : after + 2]
            last = page[-1]["id"] if page else None
            return httpx2.Response(200, json={"data": page, "last_id": last, "has_more": len(found) > after + 2})
        [named] = [one for one in self.documents if path.endswith(one["id"])] or [None]
        if named is None:
            return httpx2.Response(404, json={"error": {"message": "There is no such document."}})
        if request.method == "DELETE":
            self.documents.remove(named)
        return httpx2.Response(200, json=named)

    def keep(self, name: str, text: str, tokens: int | None = 7, **more: Any) -> dict[str, Any]:
        told = {
            "id": f"doc-{len(self.documents)}",
            "name": name,
            "state": "ready" if tokens else "reading",
            "bytes": len(text.encode()),
            "tokens": tokens,
            "expires_at": None,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            **more,
        }
        self.documents.append(told)
        return told


@pytest.fixture
def keeping() -> KeepingServer:
    """A server in this process."""
    return KeepingServer()


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text file with a byte order mark, which is no part of its text."""
    path = tmp_path / "a book.txt"
    path.write_text(TEXT, "utf-8-sig")
    return path


def asked(server: FakeServer, turn: int) -> Any:
    """The content of the last message of a turn."""
    return server.bodies[turn]["messages"][-1]["content"]


def test_a_file_is_sent_once_and_named_from_then_on(keeping: KeepingServer, book: Path) -> None:
    shown, _ = chat(keeping, f"/upload {book}", "Who speaks?", "And then?")
    assert [body.removeprefix(b"\xef\xbb\xbf").decode() for body in keeping.received] == [TEXT]
    assert "a book.txt: 25 bytes, reading, in front of the next message" in shown
    named = {"type": "file", "file": {"file_id": "doc-0"}}
    assert asked(keeping, 0) == [named, {"type": "text", "text": "Who speaks?"}]
    assert asked(keeping, 1) == "And then?"
    assert keeping.bodies[1]["messages"][0]["content"][0] == named, "the history begins as before"
    again, _ = chat(keeping, f"/upload {book}", "Who?")
    assert "a book.txt is kept already" in again
    assert len(keeping.received) == 1
    assert asked(keeping, 2)[0] == named


def test_a_file_that_has_changed_is_sent_again(keeping: KeepingServer, book: Path) -> None:
    keeping.keep("a book.txt", "another text")
    keeping.keep("a book.txt", TEXT, state="failed")
    keeping.keep("b.txt", TEXT)
    chat(keeping, f"/upload {book}")
    assert len(keeping.received) == 1


def test_documents_are_listed_used_and_forgotten(keeping: KeepingServer) -> None:
    for number in range(5):
        keeping.keep(f"{number}.txt", TEXT, tokens=1000 + number, expires_at=1_800_000_000 if number else None)
    keeping.keep("0.txt", TEXT, tokens=1005)
    lines = ["/documents", "/use 3.txt", "/use doc-4", "/use 1.txt", "/forget 1.txt", "/use 1.txt", "/use doc-9", "Hi"]
    shown, _ = chat(keeping, *lines)
    rows = [line.split() for line in shown.splitlines()[1:7]]
    assert rows[0] == ["0.txt", "1,000", "tokens"]
    assert [row[:2] for row in rows] == [*([f"{n}.txt", f"1,00{n}"] for n in range(5)), ["doc-5", "1,005"]]
    assert rows[1][-2:] == ["until", "2027-01-15"]
    assert "1.txt is forgotten" in shown
    assert "no document is named '1.txt'; /documents lists them" in shown
    assert "There is no such document." in shown
    assert [part["file"]["file_id"] for part in asked(keeping, 0)[:-1]] == ["doc-3", "doc-4"]
    assert "no documents are kept; /upload PATH keeps one" in chat(KeepingServer(), "/documents")[0]


def test_clear_takes_back_what_waits(keeping: KeepingServer) -> None:
    keeping.keep("a.txt", TEXT)
    chat(keeping, "/use a.txt", "/clear", "Hi")
    assert asked(keeping, 0) == "Hi"


def test_a_pdf_is_kept_as_its_text_once(
    keeping: KeepingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.chat.files.read_apart", read_pdf)
    (tmp_path / "owl.pdf").write_bytes(pdf("The owl's key is 4071."))
    shown, _ = chat(keeping, f"/upload {tmp_path}/owl.pdf", f"/upload {tmp_path}/owl.pdf")
    assert [one.decode() for one in keeping.received] == ["[page 1]\nThe owl's key is 4071.\n"]
    assert "owl.pdf is kept already" in shown


def test_what_cannot_be_sent_is_told_before_it_is(
    keeping: KeepingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.chat.files.read_apart", read_pdf)
    (tmp_path / "book.pdf").write_bytes(b"%PDF-1.7\n\xff")
    (tmp_path / "bad").write_bytes(b"0123456789\xff")
    lines = ["/upload", "/use", "/forget", *(f"/upload {tmp_path}/{name}" for name in ("none", "bad", "book.pdf"))]
    shown, _ = chat(keeping, *lines)
    for words in (
        "/upload needs a path: /upload book.txt",
        "/use needs a name or an id: /use book.txt",
        "/forget needs a name or an id",
        "none': No such file",
        "'bad' is no UTF-8 text: byte 10 is none",
        "book.pdf' is a damaged PDF",
    ):
        assert words in shown
    assert not keeping.received


class PlainServer(FakeServer):
    """Any OpenAI server: it knows no documents."""

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path.startswith("/v1/documents"):
            return httpx2.Response(404, content=json.dumps({"detail": "Not Found"}))
        return super().__call__(request)


def test_with_a_server_that_keeps_nothing_all_else_goes_on(book: Path) -> None:
    server = PlainServer()
    shown, _ = chat(server, f"/upload {book}", "/documents", "/use x", f"/file {book}", "Who?")
    assert shown.count("this server keeps no documents; /file PATH puts a text itself in front") == 3
    assert asked(server, 0).endswith(f"{TEXT}\n\nWho?")
