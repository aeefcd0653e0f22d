"""A PDF is taken wherever a file is: as a document, a file, a part of a message; and its text is told."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.documents.pdf import PdfError, PdfText
from longreach.documents.pdf_child import read_pdf
from longreach.documents.pdf_process import read_apart
from longreach.text.tokenizer import Tokenizer

from tests.pdfs import drawn_pages, locked, pdf
from tests.server.api.anthropic_client import TEMPLATE
from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import prompt_of
from tests.server.api.told import error_of

OWL = pdf("The owl's key is 4071.", None)
TEXT = "[page 1]\nThe owl's key is 4071.\n\n[page 2: no text]\n"
SENT = base64.b64encode(OWL).decode()
IN_A_MESSAGE = f'<document name="owl.pdf">\n{TEXT}\n</document>'
TYPE = {"content-type": "application/pdf"}


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, max_model_len=4096) as server:
        yield server


@pytest.fixture
def near(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """The server that reads PDFs in its own process, which is quicker."""

    async def read(question: Any) -> PdfText:
        return read_pdf(question.data, question.most_bytes)

    monkeypatch.setattr(live.service.pdfs._turns, "_work", read)
    return live


def test_the_text_of_a_file_is_told_and_not_kept(live: LiveServer) -> None:
    told = live.http.post("/v1/text?name=owl.pdf", content=OWL, headers=TYPE).json()
    assert told == {"object": "text", "text": TEXT, "pages": 2, "pages_without_text": 1}
    assert live.http.post("/v1/text", content=OWL).json() == told, "its first bytes say what it is"
    plain = live.http.post("/v1/text", content="Grüße".encode()).json()
    assert plain == {"object": "text", "text": "Grüße", "pages": None, "pages_without_text": None}
    assert live.http.get("/v1/documents").json()["data"] == []
    refused: list[tuple[dict[str, Any], int, str, str]] = [
        ({"content": locked(OWL, "x"), "params": {"name": "owl.pdf"}}, 400, "encrypted_pdf", "'owl.pdf' needs a pass"),
        ({"content": b"\x89PNG\r\n\x1a\n"}, 400, "not_text", "is an image"),
        ({"content": b" " * (64 * 2**20 + 1)}, 413, "body_too_large", "67108864 bytes allowed"),
    ]
    for sent, status, code, says in refused:
        answer = live.http.post("/v1/text", **sent)
        assert says in error_of(answer, status, code)["message"]


def test_a_pdf_is_kept_as_its_text(near: LiveServer, tokenizer: Tokenizer) -> None:
    made = near.openai.files.create(file=("owl.pdf", OWL), purpose="user_data")
    assert (made.filename, made.bytes) == ("owl.pdf", len(TEXT))
    assert near.openai.files.content(made.id).read().decode() == TEXT
    content: Any = [{"type": "file", "file": {"file_id": made.id}}, {"type": "text", "text": "Which?"}]
    near.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=1)
    assert f"{IN_A_MESSAGE}\nWhich?" in prompt_of(near, tokenizer)
    again = near.http.post("/v1/documents?name=owl.pdf&wait=true", content=OWL, headers=TYPE)
    assert (again.status_code, again.json()["id"]) == (200, made.id.replace("file-", "doc-"))
    answer = near.http.post("/v1/documents?name=x", content=pdf(None), headers=TYPE)
    error_of(answer, 400, "no_text_in_pdf")
    near.openai.files.delete(made.id)
    assert near.http.get("/v1/documents").json()["data"] == [], "nothing is kept of one that was refused"


def test_a_process_of_its_own_is_ended_when_its_time_is_up() -> None:
    assert read_apart(OWL, 1 << 20) == PdfText(TEXT, 2, 1)
    with pytest.raises(PdfError, match="takes more than 1 s or 1024 MiB to read") as error:
        read_apart(drawn_pages(20, operators=500_000), 1 << 20, seconds=1)
    assert error.value.code == "pdf_too_large"


def _chat(live: LiveServer, data: str, name: str | None = "owl.pdf") -> Any:
    file = {"type": "file", "file": {"file_data": data, **({} if name is None else {"filename": name})}}
    content = [file, {"type": "text", "text": "Which?"}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return live.http.post("/v1/chat/completions", json=body)


def test_a_pdf_in_a_message_is_read_for_every_protocol(near: LiveServer, tokenizer: Tokenizer) -> None:
    for data in (SENT, f"data:application/pdf;base64,{SENT}"):
        assert _chat(near, data).status_code == 200
        assert f"{IN_A_MESSAGE}\nWhich?" in prompt_of(near, tokenizer)
    part = {"type": "input_file", "file_data": SENT, "filename": "owl.pdf"}
    item = {"role": "user", "content": [part, {"type": "input_text", "text": "Which?"}]}
    first = near.http.post("/v1/responses", json={"model": MODEL, "input": [item], "max_output_tokens": 1}).json()
    assert f"{IN_A_MESSAGE}\nWhich?" in prompt_of(near, tokenizer)
    body = {"model": MODEL, "previous_response_id": first["id"], "input": "And?", "max_output_tokens": 1}
    assert near.http.post("/v1/responses", json=body).status_code == 200
    assert f"{IN_A_MESSAGE}\nWhich?" in prompt_of(near, tokenizer), "a kept response is continued with it"
    source = {"type": "base64", "media_type": "application/pdf", "data": SENT}
    block = {"type": "document", "source": source, "title": "owl.pdf", "context": "A riddle."}
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    assert near.http.post("/v1/messages", json=body).status_code == 200
    assert f"{IN_A_MESSAGE}\n<context>\nA riddle.\n</context>" in prompt_of(near, tokenizer)


def test_a_pdf_in_a_message_that_cannot_be_read_reaches_no_engine(near: LiveServer) -> None:
    before = len(near.engine.requests)
    answer = _chat(near, base64.b64encode(locked(OWL, "x")).decode())
    error = error_of(answer, 400, "encrypted_pdf")
    assert (error["param"], error["message"]) == (
        "messages",
        "`messages`: 'owl.pdf' needs a password; save a copy without one, as `qpdf --decrypt a.pdf b.pdf` does.",
    )
    scanned = _chat(near, base64.b64encode(pdf(None)).decode(), None)
    assert "`messages`: the file has no text in it" in error_of(scanned, 400, "no_text_in_pdf")["message"]
    assert len(near.engine.requests) == before


def test_a_pdf_that_comes_again_is_not_read_again(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.http.post("/v1/text", content=OWL).json()["text"] == TEXT
    monkeypatch.setattr(live.service.pdfs._turns, "_work", None)
    assert _chat(live, SENT).status_code == 200
    assert live.http.post("/v1/text", content=OWL).json()["text"] == TEXT
