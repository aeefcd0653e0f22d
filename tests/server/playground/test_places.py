"""What the sentences of an answer attended to, marked on the page, with a mouse and with keys."""

from __future__ import annotations

import pytest
from longreach.engine.messages import Generate
from longreach.engine.updates import AttendedBlocks
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import LiveServer
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import expect

from tests.server.playground.pages import ask, finished, unfold, upload

FIRST = "The owl 🦉 of Hollin sleeps in the tower by day."
SECOND = "The ferry to the pier leaves at seven each night."
TEXT = "\n".join([*["Nothing 🌊 is said here."] * 9, FIRST, *["Nor is it here."] * 9, SECOND, *["Nor here."] * 20])


def test_a_sentence_shows_its_places(server: LiveServer, open_page: OpenPage, tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_here(" It sleeps. It sails.", special=False)
    half = len(tokenizer.encode_here(" It sleeps.", special=False))
    server.engine.answer = lambda _: answer

    def attends(request: Generate, count: int) -> AttendedBlocks:
        wanted = tokenizer.encode_here((FIRST if count <= half else SECOND)[9:], special=False)[1:12]
        prompt = request.prompt
        at = next(i for i in range(len(prompt)) if prompt[i : i + len(wanted)] == wanted)
        return AttendedBlocks([at // 16], [0.5])

    server.engine.attends = attends
    page = open_page(server.url)
    upload(page, TEXT)
    turn = ask(page, "What does the owl do?")
    finished(page)
    assert not server.engine.requests[-1].places
    expect(turn.locator(".places")).to_have_count(0)
    unfold(page, "settings")
    page.check("#places")
    turn = ask(page, "What does the owl do?")
    finished(page)
    expect(turn.locator(".answer")).to_have_text("It sleeps. It sails.")
    mark, places = turn.locator(".places mark"), turn.locator(".places")
    expect(mark).to_contain_text(FIRST[8:])
    expect(places).to_contain_text("of the document, 100% of the weight")
    expect(places).to_contain_text("It proves nothing.")
    sails = turn.get_by_role("button", name="It sails.")
    sails.hover()
    expect(mark).to_contain_text(SECOND[3:])
    expect(sails).to_have_attribute("aria-pressed", "true")
    page.mouse.move(0, 0)
    turn.get_by_role("button", name="It sleeps.").focus()
    expect(mark).to_contain_text(FIRST[8:])
    page.keyboard.press("Tab")
    expect(mark).to_contain_text(SECOND[3:])
