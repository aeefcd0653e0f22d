"""A question on the page: how it is read, answered, measured, stopped, refused, and copied."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from longreach.engine.errors import EngineDeadError, QueueFullError
from longreach.text.tokenizer import Tokenizer

from tests.pairwise import covering
from tests.server.api.conftest import LiveServer, chat_of, eventually
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import expect

from tests.server.playground.pages import ask, finished, unfold, upload

TEXT = "The keeper of the lantern walks along the river. The pass key is 4071.\n" * 8
QUESTION = "What is <b>the</b> pass key?"


@pytest.fixture
def says(server: LiveServer, tokenizer: Tokenizer) -> Callable[[str], None]:
    """Let the engine answer with a text."""

    def answer_with(text: str) -> None:
        ids = tokenizer.encode_here(text, special=False)
        server.engine.answer = lambda request: ids

    return answer_with


def test_a_document_is_read_and_its_question_answered(
    server: LiveServer, open_page: OpenPage, says: Callable[[str], None]
) -> None:
    says(" 4071 <i>lantern</i>")
    server.engine.hold_prefill = True
    page = open_page(server.url)
    upload(page, TEXT)
    expect(page.locator("#book-beginning")).to_contain_text("The keeper of the lantern")
    turn = ask(page, QUESTION)
    expect(turn.locator(".reading-words")).to_have_text(re.compile(r"^8 of \d+ tokens read · about .* left$"))
    bar = turn.get_by_role("progressbar")
    assert 0 < int(bar.get_attribute("aria-valuenow")) < 100
    server.engine.hold_prefill, server.engine.hold_decode_after = False, 2
    expect(turn.locator(".answer")).to_have_text(re.compile(r"^4?0?7?1?$"))
    expect(turn).to_have_attribute("aria-busy", "true")
    server.engine.hold_decode_after = None
    expect(turn.locator(".answer")).to_have_text("4071 <i>lantern</i>")
    finished(page)
    assert turn.locator("i, b").count() == 0
    figures = turn.locator(".figures")
    for name, value in (("First token", r"[\d.]+ (ms|s)"), ("Speed", r"[\d.]+ tokens/s"), ("Between tokens", "")):
        expect(figures).to_contain_text(re.compile(name + value))
    assert turn.locator(".sparkline path").get_attribute("d")
    expect(page.locator("#announcer")).to_have_text("Answer:  4071 <i>lantern</i>")


def test_an_answer_that_stands_in_the_document_is_quoted_from_it(
    server: LiveServer, open_page: OpenPage, says: Callable[[str], None]
) -> None:
    page = open_page(server.url)
    upload(page, "a\n" * 50 + "The key (old) is 40.71+ here.\n" + "b\n" * 35)
    for answer, quotes in (
        (" 40.71+.", ["At 58.5% of the document: “The key (old) is 40.71+ here.”"]),
        ("old, 40.71+", ["The key (old) is", "The key (old) is 40.71+"]),
        ("The", ["“The key"]),
        ("0.71", []),
        ("gone", []),
        ("old, gone", []),
    ):
        says(answer)
        turn = ask(page, f"And {answer}?")
        finished(page)
        expect(turn.locator(".quotes p")).to_have_count(len(quotes))
        for place, quote in enumerate(quotes):
            expect(turn.locator(".quotes p").nth(place)).to_contain_text(quote)


def test_a_conversation_goes_on_and_ends_with_its_document(server: LiveServer, open_page: OpenPage) -> None:
    server.engine.answer = lambda request: request.prompt[10:13]
    page = open_page(server.url)
    upload(page, TEXT)
    ask(page, "first?")
    finished(page)
    server.engine.cached = 1234
    turn = ask(page, "second?")
    finished(page)
    expect(turn.locator(".figures")).to_contain_text("From cache1,234 tokens")
    first, second = (request.prompt for request in server.engine.requests)
    assert second[: len(first)] == first
    assert len(second) > len(first)
    unfold(page, "settings")
    page.uncheck("#remember")
    ask(page, "first?")
    finished(page)
    assert server.engine.requests[2].prompt == first
    page.check("#remember")
    upload(page, TEXT)
    ask(page, "first?")
    finished(page)
    assert server.engine.requests[3].prompt == first


@pytest.mark.parametrize("reading", [True, False])
def test_a_question_is_stopped_by_a_key_and_by_a_button(server: LiveServer, open_page: OpenPage, reading: bool) -> None:
    page = open_page(server.url)
    upload(page, TEXT)
    for count, stop in enumerate((lambda: page.keyboard.press("Escape"), lambda: page.click("#stop")), start=1):
        server.engine.hold_prefill, server.engine.hold_decode_after = reading, 3
        turn = ask(page, f"{count}?")
        expect(turn.locator(".reading-words" if reading else ".answer")).to_contain_text("8 of" if reading else "User")
        stop()
        finished(page)
        expect(turn.locator(".note")).to_have_text("Stopped.")
        eventually(lambda wanted=count: len(server.engine.cancelled) == wanted)
    assert server.idle


@pytest.mark.parametrize("reading", [True, False])
def test_an_answer_goes_on_when_its_connection_is_cut(
    server: LiveServer, open_page: OpenPage, says: Callable[[str], None], reading: bool
) -> None:
    page = open_page(server.url, expected=("ERR_",))
    says("the keeper of the lantern walks")
    upload(page, TEXT)
    server.engine.hold_prefill, server.engine.hold_decode_after = reading, 4
    turn = ask(page, "who?")
    expect(turn.locator(".reading-words" if reading else ".answer")).to_contain_text("8 of" if reading else "the")

    def cut() -> None:
        for connection in [*server.connections]:
            connection.transport.abort()
        server.engine.hold_prefill, server.engine.hold_decode_after = False, None

    server.call(cut)
    expect(turn.locator(".answer")).to_have_text("the keeper of the lantern walks")
    finished(page)
    expect(turn.get_by_role("alert")).to_be_hidden()
    assert len(server.engine.requests) == 1, "the same request goes on"


def test_a_page_that_is_left_ends_its_question(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    server.engine.hold_decode_after = 3
    turn = ask(page, "who?")
    expect(turn.locator(".answer")).to_contain_text("User")
    page.goto("about:blank")
    eventually(lambda: len(server.engine.cancelled) == 1)


def test_what_goes_wrong_is_said_in_words(server: LiveServer, open_page: OpenPage, says: Callable[[str], None]) -> None:
    page = open_page(server.url, expected=("429", "400", "404", "ERR_"))
    says("half an answer that breaks off")
    server.engine.full = QueueFullError("too much is waiting", 7)
    turn = ask(page, "full?")
    expect(turn.get_by_role("alert")).to_contain_text("Try again in 7 s.")
    finished(page)
    server.engine.full = None
    unfold(page, "settings")
    page.fill("#max-tokens", "99999")
    turn = ask(page, "long?")
    expect(turn.get_by_role("alert")).to_contain_text("maximum context length is 65536 tokens")
    page.fill("#max-tokens", "64")
    server.engine.hold_decode_after = 2
    turn = ask(page, "broken?")
    expect(turn.locator(".answer")).to_have_text(re.compile("^h"))
    server.engine.failure = EngineDeadError("it died")
    server.engine.hold_decode_after = None
    expect(turn.get_by_role("alert")).to_contain_text("The engine has stopped")
    finished(page)
    page.context.set_offline(True)
    turn = ask(page, "gone?")
    expect(turn.get_by_role("alert")).to_have_text("The server does not answer. Is it still running?")


def test_a_server_that_is_loading_is_waited_for(
    make_server: Callable[..., LiveServer], open_page: OpenPage, tokenizer: Tokenizer
) -> None:
    with make_server(ready=False) as server:
        page = open_page(server.url, expected=("503",))
        expect(page.get_by_role("alert").first).to_have_text("The model is still loading. Trying again…")
        expect(page.locator("#ask")).to_be_disabled()
        server.call(lambda: server.service.attach(server.engine, tokenizer, chat_of("{{ messages[0].content }}")))
        expect(page.locator("#model")).to_have_text("tiny-owl · reads 65,536 tokens")
        ask(page, "there?")
        finished(page)


def test_a_key_is_asked_for_and_used(make_server: Callable[..., LiveServer], open_page: OpenPage) -> None:
    with make_server(api_key="a-secret-key") as server:
        page = open_page(server.url, expected=("401",))
        expect(page.get_by_label("This server asks for an API key")).to_be_focused()
        page.keyboard.type("wrong-key-123")
        page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_have_text("The server does not know this key.")
        page.get_by_label("This server asks for an API key").fill("a-secret-key")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("tiny-owl")
        expect(page.locator("#key-form")).to_be_hidden()
        ask(page, "there?")
        finished(page)
        assert len(server.engine.requests) == 1
        page.reload()
        expect(page.locator("#model")).to_contain_text("tiny-owl")
        page.click("#copy-curl")
        expect(page.locator("#copied")).to_contain_text("Copied")
        assert "a-secret-key" not in page.evaluate("() => navigator.clipboard.readText()")


@pytest.mark.parametrize(("form", "repeats"), covering(["plain", "chat"], [1, 60], strength=1))
def test_copies_are_the_request_that_the_page_sends(
    server: LiveServer, open_page: OpenPage, tmp_path: Path, form: str, repeats: int
) -> None:
    text = 'It\'s "$1" \\ `a` {b}\n日本語 🦉 \u2028 True\n' * repeats
    (tmp_path / "my book's.txt").write_text(text, newline="")
    page = open_page(server.url)
    upload(page, text, "my book's.txt")
    unfold(page, "settings")
    page.select_option("#form", form)
    page.fill("#max-tokens", "7")
    page.fill("#temperature", "0.5")
    page.fill("#question", 'What\'s "it"?')
    page.click("#copy-python")
    expect(page.locator("#copied")).to_contain_text("Copied as Python")
    program = clipboard(page)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)
    commands = []
    if repeats == 1 or shutil.which("jq") is not None:
        page.click("#copy-curl")
        expect(page.locator("#copied")).to_contain_text("Copied as curl")
        commands = [clipboard(page)]
    for command in commands:
        subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, timeout=120, capture_output=True)
    ask(page, 'What\'s "it"?')
    finished(page)
    *copies, own = server.engine.requests
    assert len(copies) == 1 + len(commands)
    for copy in copies:
        assert (copy.prompt, copy.max_tokens, copy.sampling.temperature) == (own.prompt, 7, 0.5)


def clipboard(page: Any) -> str:
    return page.evaluate("() => navigator.clipboard.readText()")
