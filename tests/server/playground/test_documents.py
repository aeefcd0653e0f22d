"""Getting a document onto the page: files, drops, pastes, what is no text, what is too long, and how it is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from longreach.chat.files import read_folder
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
  document.querySelector("#question").dispatchEvent(event);
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


def test_a_folder_is_one_text_under_its_paths(server: LiveServer, open_page: OpenPage, tmp_path: Path) -> None:
    files = {
        "b.py": b"two\n\n",
        "a/z.txt": "Köln".encode("windows-1252"),
        "a/B.txt": b"",
        ".env": b"kept",
        ".git/config": b"hidden",
        "node_modules/x.js": b"other",
        "uv.lock": b"lock",
        "go.sum": b"lock",
        "big.txt": b"x" * 1_000_001,
        "picture.png": b"\x89PNG\x00",
        "paper.pdf": b"%PDF-1.7",
    }
    for name, content in files.items():
        path = tmp_path / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    page = open_page(server.url)
    page.set_input_files("#folder", tmp_path / "app")
    expect(page.locator("#book-name")).to_have_text("app")
    expect(page.locator("#book-size")).to_contain_text("4 files")
    expect(page.locator("#skipped")).to_contain_text("Skipped: ")
    skipped = page.locator("#skipped").inner_text().removeprefix("Skipped: ").removesuffix(".").split(", ")
    assert set(skipped) >= {"2 lock files", "1 file over 1 MB", "2 binary files", "node_modules"}
    ask(page, "What?")
    finished(page)
    text = "=== app/.env ===\nkept\n\n=== app/a/B.txt ===\n\n\n=== app/a/z.txt ===\nKöln\n\n=== app/b.py ===\ntwo\n\n"
    expect(page.locator(".turn .answer")).to_contain_text("=== app/a/z.txt ===")
    assert read_folder(tmp_path / "app").text == text, "the chat joins a folder as the page does"
    joined, left_out = page.evaluate(DROPPED)
    assert joined == text
    assert left_out == "Skipped: hidden folders, 1 file over 1 MB, 2 lock files, node_modules."


# What a browser gives of a dropped folder: entries, whose readers tell a part at a time.
DROPPED = """async () => {
  const { filesOfDrop, bookOf } = await import("/playground/files.js");
  const file = (path, text) => ({ isFile: true, name: path.split("/").at(-1), fullPath: path,
    file: done => done(new File([text], path.split("/").at(-1))) });
  const folder = (path, parts) => ({ isDirectory: true, name: path.split("/").at(-1), fullPath: path,
    createReader: () => ({ readEntries: done => done(parts.shift() ?? []) }) });
  const root = folder("/app", [
    [file("/app/b.py", "two\\n\\n"), folder("/app/.git", [[file("/app/.git/config", "hidden")]])],
    [folder("/app/a", [[file("/app/a/z.txt", "Köln")], [file("/app/a/B.txt", "")]]), file("/app/.env", "kept")],
    [folder("/app/node_modules", []), file("/app/uv.lock", ""), file("/app/go.sum", ""),
     file("/app/big.txt", "x".repeat(1000001))],
  ]);
  const dropped = filesOfDrop({ items: [{ webkitGetAsEntry: () => root }], files: [] });
  const book = await bookOf(await dropped);
  return [book.text, book.skipped];
}"""


def test_a_pdf_is_read_by_the_server(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url, expected=("400",))
    answers = [{"text": "The pass key is 4071.", "pages": 2}, {"error": {"message": "This PDF is encrypted."}}]
    sent = []

    def read(route: Any) -> None:
        sent.append((route.request.headers["content-type"], route.request.post_data_buffer))
        route.fulfill(status=400 if len(sent) > 1 else 200, json=answers[len(sent) - 1])

    page.route("**/v1/text*", read)
    choose(page, b"%PDF-1.7 ...", "paper.pdf")
    expect(page.locator("#book-beginning")).to_have_text("The pass key is 4071.")
    expect(page.locator("#book-size")).to_contain_text("2 pages")
    choose(page, b"%PDF-1.6 ...", "secret.pdf")
    expect(page.locator("#document-error")).to_have_text("secret.pdf: This PDF is encrypted.")
    expect(page.locator("#book-name")).to_have_text("paper.pdf")
    assert sent == [("application/pdf", b"%PDF-1.7 ..."), ("application/pdf", b"%PDF-1.6 ...")]


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
    make_server: Callable[..., LiveServer], open_page: OpenPage, tokenizer: Tokenizer
) -> None:
    text = "The owl and the lantern. " * 25_000
    with make_server(max_model_len=2**20) as server:
        page = open_page(server.url)
        with page.expect_request("**/tokenize") as request:
            upload(page, text)
        assert len(request.value.post_data) < 200_000
        expect(page.locator("#book-size")).to_contain_text("625,000 characters · about")
        estimate = counted(page)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=ANSWER))
        ask(page, "How many?")
        finished(page)
        expect(page.locator("#book-size")).to_have_text("625,000 characters · 500,017 tokens with the question")
    assert estimate == pytest.approx(len(tokenizer.encode_here(text)), rel=0.01)


ANSWER = (
    'data: {"choices":[{"delta":{"content":"Many."}}],"usage":{"prompt_tokens":500017,"completion_tokens":1}}\n\n'
    "data: [DONE]\n\n"
)


def counted(page: Any) -> int:
    expect(page.locator("#book-size")).to_contain_text("tokens")
    return int(page.locator("#book-size").inner_text().split("·")[1].removeprefix(" about").split()[0].replace(",", ""))
