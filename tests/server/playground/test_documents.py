"""Getting a document onto the page: files, drops, pastes, what is no text, what is too long, and how it is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import LiveServer
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import expect

from tests.server.playground.pages import ask, choose, finished, upload

DROP = """text => {
  const data = new DataTransfer();
  data.items.add(new File([text], "dropped.md"));
  const event = new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: data });
  document.querySelector("footer").dispatchEvent(event);
}"""
PASTE = """([text, where]) => {
  const data = new DataTransfer();
  data.setData("text/plain", text);
  const event = new ClipboardEvent("paste", { bubbles: true, cancelable: true, clipboardData: data });
  return document.querySelector(where).dispatchEvent(event);
}"""


def test_files_are_dropped_anywhere(server: LiveServer, open_page: OpenPage, tokenizer: Tokenizer) -> None:
    page = open_page(server.url)
    text = "The owl sat on the bridge."
    page.evaluate(DROP, text)
    expect(page.locator("#book-name")).to_have_text("dropped.md")
    expect(page.locator("#book-size")).to_have_text(f"26 characters · {len(tokenizer.encode_here(text))} tokens")
    expect(page.locator("#book-beginning")).to_have_text(text)
    page.click("#remove")
    expect(page.locator("#drop")).to_be_visible()
    expect(page.locator("#example")).to_be_focused()


def test_a_long_paste_is_a_document_and_a_short_one_in_a_field_is_not(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    assert page.evaluate(PASTE, ["What is the key?", "#question"]), "left to the browser"
    expect(page.locator("#book")).to_be_hidden()
    assert not page.evaluate(PASTE, ["The key is 4071. " * 400, "#question"])
    expect(page.locator("#book-name")).to_have_text("Pasted text")
    assert page.locator("#question").input_value() == ""
    page.click("#remove")
    page.evaluate(PASTE, ["A short one.", "body"])
    expect(page.locator("#book-size")).to_contain_text("12 characters")
    page.click("#remove")
    page.evaluate("() => navigator.clipboard.writeText('By the button.')")
    page.click("#paste")
    expect(page.locator("#book-beginning")).to_have_text("By the button.")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("book.epub", b"PK\x03\x04...", "book.epub is an archive"),
        ("book.bin", b"\x01\x00\x02", "book.bin is not a text file."),
        ("book.txt", b" \n", "book.txt is empty."),
    ],
)
def test_what_is_no_text_is_refused(
    server: LiveServer, open_page: OpenPage, name: str, content: bytes, words: str
) -> None:
    page = open_page(server.url)
    upload(page, "What was there before stays.")
    choose(page, content, name)
    expect(page.locator("#document-error")).to_contain_text(words)
    expect(page.locator("#book-beginning")).to_have_text("What was there before stays.")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "windows-1252"])
def test_encodings(server: LiveServer, open_page: OpenPage, encoding: str) -> None:
    page = open_page(server.url)
    upload(page, "Grüße aus Köln".encode(encoding))
    expect(page.locator("#book-beginning")).to_have_text("Grüße aus Köln")
    remark = page.locator("#book-size", has_text="not UTF-8, read as Windows-1252")
    expect(remark).to_have_count(1 if encoding == "windows-1252" else 0)


def test_what_is_too_long_is_said_and_can_be_cut(make_server: Callable[..., LiveServer], open_page: OpenPage) -> None:
    with make_server(max_model_len=4096) as server:
        page = open_page(server.url)
        upload(page, "The owl. " * 3_000)
        tokens = counted(page)
        expect(page.locator("#gauge-words")).to_contain_text("tokens too long: the model reads 4,096")
        expect(page.locator("#ask")).to_be_disabled()
        expect(page.locator("#too-long")).to_contain_text("tokens too long to be asked about")
        page.fill("#question", "Does it fit?")
        page.press("#question", "Enter")
        expect(page.locator("#question")).to_have_value("Does it fit?")
        page.click("#cut-here")
        expect(page.locator("#gauge-words")).to_contain_text("of the 4,096 tokens")
        expect(page.locator("#too-long")).to_be_hidden()
        assert 3_000 < counted(page) < min(tokens, 4_096)
        ask(page, "Does it fit?")
        finished(page)
        [request] = server.engine.requests
        assert 256 <= request.max_tokens < 4_096 - len(request.prompt), "what fits beside the document"


def test_a_long_text_is_estimated_from_little_and_counted_by_its_first_answer(
    server: LiveServer, open_page: OpenPage, tokenizer: Tokenizer
) -> None:
    text = "The owl and the lantern. " * 50_000
    page = open_page(server.url)
    with page.expect_request("**/tokenize") as request:
        upload(page, text)
    assert len(request.value.post_data) < 200_000
    expect(page.locator("#book-size")).to_contain_text("1,250,000 characters · about")
    estimate = counted(page)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=ANSWER))
    ask(page, "How many?")
    finished(page)
    expect(page.locator("#book-size")).to_have_text("1,250,000 characters · 500,017 tokens with the question")
    assert estimate == pytest.approx(len(tokenizer.encode_here(text)), rel=0.01)


ANSWER = (
    'data: {"choices":[{"delta":{"content":"Many."}}],"usage":{"prompt_tokens":500017,"completion_tokens":1}}\n\n'
    "data: [DONE]\n\n"
)


def counted(page: Any) -> int:
    expect(page.locator("#book-size")).to_contain_text("tokens")
    return int(page.locator("#book-size").inner_text().split("·")[1].removeprefix(" about").split()[0].replace(",", ""))
