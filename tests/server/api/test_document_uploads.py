"""A text that is uploaded as it is: read before its end, kept when it is whole, and gone when its sender is."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from longreach.documents import text_pipeline
from longreach.documents.read_ahead import ReadAhead
from longreach.text import growing_text

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.told import error_of
from tests.server.conftest import EOS

CHAT = "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}<|begin|>assistant: "
SENTENCE = "The keeper of the lantern walks along the river, and the owl sees it. "


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_text, "LEAST_PIECE", 100)
    monkeypatch.setattr(growing_text, "MOST_PIECE", 1000)


@pytest.fixture
def server(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(max_model_len=4096, template=CHAT, body_timeout=20) as live:
        yield live


@pytest.fixture
def hasty(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    """A server that gives senders half a second."""
    with make_server(max_model_len=4096, template=CHAT, body_timeout=0.5) as live:
        yield live


class Sender:
    """A client that sends a text in parts, whenever it likes."""

    def __init__(self, server: LiveServer, query: str = "", path: str = "/v1/documents") -> None:
        self.sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        head = f"POST {path}?{query} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
        self.sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())

    def send(self, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        self.sock.sendall(b"%x\r\n%s\r\n" % (len(data), data))

    def answer(self, *, end: bool = True) -> tuple[int, dict[str, Any]]:
        """What the server answers, at the end or before it."""
        if end:
            self.sock.sendall(b"0\r\n\r\n")
        data = b""
        while not data.partition(b"\r\n\r\n")[2].endswith(b"}"):
            data += (chunk := self.sock.recv(65536))
            assert chunk, data
        self.sock.close()
        return int(data[9:12]), orjson.loads(data.partition(b"\r\n\r\n")[2])


def listed(server: LiveServer) -> list[dict[str, Any]]:
    return server.http.get("/v1/documents").json()["data"]


PAGE = 64  # tokens of the engine's pages: a part of one is not read ahead


def ask(server: LiveServer, document: str, question: str = "Who walks?") -> list[int]:
    """The prompt of a question about a document."""
    body = {"model": MODEL, "document": document, "messages": [{"role": "user", "content": question}], "max_tokens": 1}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return server.engine.requests[-1].prompt


def whole_prompt(server: LiveServer, text: str, name: str = "book.txt", question: str = "Who walks?") -> list[int]:
    """The same, with the text in the question."""
    said = f'<document name="{name}">\n{text}\n</document>\n{question}'
    body = {"model": MODEL, "messages": [{"role": "user", "content": said}], "max_tokens": 1}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    return server.engine.requests[-1].prompt


def test_reading_begins_before_the_last_byte(server: LiveServer) -> None:
    text = f"Grüße! {SENTENCE * 30}{EOS} is text, and so is <|be"
    data = text.encode()
    sender = Sender(server, "name=book.txt&ttl_seconds=60&pin=true&attention=window:512:4")
    for start in range(0, 1400, 7):  # within characters, too
        sender.send(data[start : start + 7])
    eventually(lambda: bool(server.engine.requests))
    [coming] = listed(server)
    assert (coming["state"], coming["tokens"]) == ("uploading", None)
    sender.send(data[1400:])
    status, document = sender.answer()
    assert status == 201
    assert (document["name"], document["bytes"], document["pinned"]) == ("book.txt", len(data), True)
    eventually(lambda: server.http.get(f"/v1/documents/{document['id']}").json()["state"] == "ready")
    reads = [request for request in server.engine.requests if request.flexible]
    assert len(reads) > 1
    assert all(request.attention.name == "window" for request in reads)
    asked = ask(server, "book.txt")
    assert asked == whole_prompt(server, text)
    longest = max(reads, key=lambda request: len(request.prompt)).prompt
    assert asked[: len(longest)] == longest
    assert len(longest) == document["tokens"] // PAGE * PAGE
    assert len(asked) - document["tokens"] < 25  # the question, and what stands around it
    eventually(lambda: not server.service.bodies.total)


def test_only_the_rest_of_a_prompt_is_encoded(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = server.service.require_ready()
    for use in ("chat", "completion"):
        sender = Sender(server, f"name=book-{use}&use={use}")
        sender.send(SENTENCE * 30)
        assert sender.answer()[0] == 201
    encoded: list[str] = []
    encode = tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode", lambda text, *more: encoded.append(text) or encode(text, *more))
    ask(server, "book-chat")
    response = server.complete(document="book-completion", prompt="Who walks?", max_tokens=1)
    assert response.status_code == 200
    assert sum(map(len, encoded)) < 200
    monkeypatch.undo()
    text = SENTENCE * 30
    ids = [*tokenizer.encode_here(text), *tokenizer.encode_here("Who walks?", special=False)]
    assert server.engine.requests[-1].prompt == ids


def test_what_is_read_for_completions_has_no_wrapping(server: LiveServer) -> None:
    sender = Sender(server, "use=completion")
    sender.send(SENTENCE * 30)
    status, document = sender.answer()
    assert status == 201
    eventually(lambda: server.http.get(f"/v1/documents/{document['id']}").json()["state"] == "ready")
    _, tokenizer = server.service.require_ready()
    whole = tokenizer.encode_here(SENTENCE * 30)
    assert max((request.prompt for request in server.engine.requests), key=len) == whole[: len(whole) // PAGE * PAGE]
    assert document["tokens"] == len(whole)


def test_an_upload_whose_sender_goes_away_is_dropped(server: LiveServer) -> None:
    server.engine.hold_prefill = True
    sender = Sender(server, "name=book")
    sender.send(SENTENCE * 30)
    eventually(lambda: bool(server.engine.running))
    sender.sock.close()
    eventually(lambda: not listed(server))
    eventually(lambda: not server.engine.running and not server.engine.places)
    assert len(server.engine.cancelled) == 1
    eventually(lambda: not server.service.uploads._going_on and not server.service.bodies.total)


def test_a_question_waits_for_the_end_of_an_upload(server: LiveServer) -> None:
    sender = Sender(server, "name=book.txt")
    sender.send(SENTENCE * 30)
    eventually(lambda: bool(listed(server)))
    body = {
        "model": MODEL,
        "document": "book.txt",
        "messages": [{"role": "user", "content": "Who walks?"}],
        "max_tokens": 1,
    }
    with server.connect(orjson.dumps(body), "/v1/chat/completions") as question:
        question.settimeout(0.2)
        with pytest.raises(TimeoutError):
            question.recv(1)
        sender.send(SENTENCE)
        status, _ = sender.answer()
        assert status == 201
        question.settimeout(20)
        assert question.recv(12) == b"HTTP/1.1 200"
    assert whole_prompt(server, SENTENCE * 31) in [request.prompt for request in server.engine.requests[:-1]]


def test_a_question_about_an_upload_that_breaks_finds_nothing(server: LiveServer) -> None:
    sender = Sender(server, "name=book.txt")
    sender.send(SENTENCE)
    eventually(lambda: bool(listed(server)))
    document_id = listed(server)[0]["id"]
    body = orjson.dumps({"model": MODEL, "document": document_id, "prompt": "?", "max_tokens": 1})
    with server.connect(body) as question:
        question.settimeout(20)
        time.sleep(0.05)
        sender.sock.close()
        assert question.recv(12) == b"HTTP/1.1 404"


def test_the_same_text_is_kept_once(server: LiveServer) -> None:
    answers = []
    for _ in range(2):
        sender = Sender(server, "name=book")
        sender.send(SENTENCE)
        answers.append(sender.answer())
    assert [status for status, _ in answers] == [201, 200]
    assert answers[0][1]["id"] == answers[1][1]["id"]
    assert len(listed(server)) == 1


def test_an_upload_has_time_while_it_comes(hasty: LiveServer) -> None:
    sender = Sender(hasty, "name=book")
    for _ in range(6):  # longer than --body-timeout
        sender.send(SENTENCE * 20)
        time.sleep(0.15)
    assert sender.answer()[0] == 201


def test_an_upload_that_stops_is_given_up(hasty: LiveServer) -> None:
    sender = Sender(hasty, "name=book")
    sender.send(SENTENCE * 20)
    eventually(lambda: bool(listed(hasty)))
    status, body = sender.answer(end=False)
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    eventually(lambda: not listed(hasty))


def test_a_text_with_too_many_tokens_is_refused_on_the_way(server: LiveServer) -> None:
    sender = Sender(server, "name=book")
    for _ in range(40):
        sender.send(SENTENCE * 20)
    status, body = sender.answer(end=False)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["n_prompt_tokens_at_least"] < 5000
    assert not listed(server)


def test_a_text_with_too_many_tokens_is_refused_while_its_sender_rests(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more has to come for that to be told."""
    monkeypatch.setattr(text_pipeline, "_SIDE_BY_SIDE", 1000)  # all of it is being encoded when it ends
    sender = Sender(server, "name=book")
    sender.send(SENTENCE * 400)
    status, body = sender.answer(end=False)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert not listed(server)


@pytest.mark.parametrize(
    ("query", "data", "status", "code"),
    [
        ("", b"\xff\xfeT\x00h\x00e\x00 \x00", 400, "not_text"),
        ("", b"The owl \xe2\x82", 400, "not_text"),
        ("", b"", 400, "invalid_value"),
        ("", b"a" * 4000, 400, "unbroken_text"),
        ("color=red", b"The owl", 400, "unknown_parameter"),
        ("ttl_seconds=soon", b"The owl", 400, "invalid_type"),
        ("name=a&name=b", b"The owl", 400, "invalid_value"),
        ("model=other", b"The owl", 404, "model_not_found"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, query: str, data: bytes, status: int, code: str
) -> None:
    monkeypatch.setattr(growing_text, "MAX_STRETCH_CHARACTERS", 1000)
    response = server.http.post(f"/v1/documents?{query}", content=data, headers={"Content-Type": "text/plain"})
    error_of(response, status, code)
    assert not listed(server)


def test_what_the_engine_cannot_read_is_kept_all_the_same(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("it cannot be read")

    monkeypatch.setattr(ReadAhead, "_read_up_to", fail)
    sender = Sender(server, "name=book.txt")
    sender.send(SENTENCE * 30)
    assert sender.answer()[0] == 201
    assert ask(server, "book.txt") == whole_prompt(server, SENTENCE * 30)


def test_more_bytes_than_a_body_may_have_are_refused(make_server: Callable[..., LiveServer]) -> None:
    with make_server(max_body_bytes=2000) as server:
        sender = Sender(server)
        sender.send(SENTENCE * 30)
        status, body = sender.answer(end=False)
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert not listed(server)


def test_bytes_that_are_stored_make_room(
    make_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_text, "LEAST_PIECE", 4096)
    monkeypatch.setattr(growing_text, "MOST_PIECE", 32768)
    with make_server(max_model_len=400_000, max_total_body_bytes=600_000) as server:
        server.engine._prefill_chunk = 400_000
        sender = Sender(server)
        for _ in range(20):
            sender.send(SENTENCE * 500)
        status, document = sender.answer()
        assert (status, document["bytes"]) == (201, 20 * 500 * len(SENTENCE)), document
        assert document["bytes"] > 600_000
