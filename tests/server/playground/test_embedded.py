"""The page with the embedded model behind it: what a newcomer sees."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from longreach.config import EMBEDDED_MODEL_DESCRIPTION

from tests.pairwise import at_length
from tests.server.api.conftest import eventually
from tests.server.api.embedded import EmbeddedServer
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import Page, Route, expect

from tests.server.playground.pages import ask, finished, unfold, upload

MINUTES_MS = 240_000  # for reading on cores that others use, too


@pytest.fixture(scope="module")
def embedded(browser: object) -> Iterator[EmbeddedServer]:
    """The default server; after the browser, so that it is not started where there is none."""
    with EmbeddedServer() as live:
        yield live


def shorten_example(page: Page) -> None:
    """Load the page anew with an example of 60 days for 365: 5K tokens with the same facts."""

    def answer(route: Route) -> None:
        script = route.fetch().text()
        assert script.count("DAYS = 365;") == 1
        route.fulfill(body=script.replace("DAYS = 365;", "DAYS = 60;"), content_type="text/javascript")

    page.route("**/example.js*", answer)
    page.reload()


def test_the_example_is_answered_in_two_clicks(embedded: EmbeddedServer, open_page: OpenPage) -> None:
    page = open_page(embedded.url)
    tokens = r"2\d,\d{3} tokens"
    if not at_length("the playground's example"):
        shorten_example(page)
        tokens = r"\d,\d{3} tokens"
    expect(page.locator("#description")).to_have_text(EMBEDDED_MODEL_DESCRIPTION)
    expect(page.locator("#form")).to_have_value("plain")
    page.click("#example")
    expect(page.locator("#book-size")).to_contain_text("tokens")
    page.get_by_role("button", name="What is the pass key for the silver lantern?").click()
    turn = page.locator(".turn").last
    expect(turn.locator(".reading-words")).to_contain_text(re.compile(rf"^[1-9][\d,]+ of {tokens} read"))
    expect(turn.locator(".answer")).to_have_text("48213", timeout=MINUTES_MS)
    expect(turn.locator(".quotes")).to_contain_text("The pass key for the silver lantern is 48213.")
    finished(page)
    page.get_by_role("button", name="What are all the signals for the supply boat?").click()
    turn = page.locator(".turn").last
    expect(turn.locator(".answer")).to_have_text("heron, anchor", timeout=MINUTES_MS)
    expect(turn.locator(".quotes p")).to_have_count(2)
    expect(turn.locator(".figures")).to_contain_text(re.compile(f"From cache{tokens}"))
    finished(page)


@pytest.mark.parametrize("width", [1280, 390])
def test_what_the_model_is_fits_the_page(embedded: EmbeddedServer, open_page: OpenPage, width: int) -> None:
    page = open_page(embedded.url, width=width)
    expect(page.locator("#description")).to_be_visible()
    box = page.locator("#description").bounding_box()
    assert box
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert page.locator("body").bounding_box()["width"] <= width


def test_a_book_of_a_hundred_thousand_tokens_is_taken_and_stopped(
    embedded: EmbeddedServer, open_page: OpenPage
) -> None:
    page = open_page(embedded.url)
    upload(page, "".join(f"Chapter {i}: the owl sat on the bridge and looked at the river.\n" for i in range(3400)))
    expect(page.locator("#book-size")).to_contain_text(re.compile(r" · 1\d\d,\d{3} tokens$"))
    expect(page.locator("#gauge-words")).to_contain_text(re.compile(r"^[789]\d% of the 131,072 tokens"))
    turn = ask(page, "Who sat on the bridge?")
    expect(turn.locator(".reading-words")).to_contain_text(re.compile(r"^[1-9][\d,]+ of 1\d\d,\d{3} tokens read"))
    page.keyboard.press("Escape")
    expect(turn.locator(".note")).to_have_text("Stopped.")
    eventually(lambda: embedded.idle)


def test_a_window_hides_needles_that_exact_attention_finds(embedded: EmbeddedServer, open_page: OpenPage) -> None:
    page = open_page(embedded.url)
    page.add_init_script("Math.random = () => 0.25;")  # the same keys every time
    page.reload()
    unfold(page, "attention")
    for place in (1, 2):
        page.uncheck(f"#needle-lengths input >> nth={place}")
    page.select_option("#needle-depths", "3")
    page.click("#needle-run")
    expect(page.locator(".run figcaption").first).to_have_text("dense: 3 of 3 found", timeout=MINUTES_MS)
    page.select_option("#policy", "window")
    page.get_by_role("spinbutton", name="size").fill("256")
    expect(page.locator("#mask-words")).to_contain_text(re.compile(r"^[\d.]+% of what exact attention sees.* tiles"))
    page.click("#needle-run")
    expect(page.locator(".run figcaption").first).to_have_text(
        "window, size 256, sinks 4: 1 of 3 found", timeout=MINUTES_MS
    )
    assert page.locator(".run").first.locator("td").last.get_attribute("class") == "found"
