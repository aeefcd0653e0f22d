"""The needle test on the page: its texts, its cells, and how it is stopped."""

from __future__ import annotations

import re

import pytest
from longreach.engine.messages import Generate
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import LiveServer, eventually
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import expect

from tests.server.playground.pages import unfold

LENGTHS = [1024, 4096]
KEY = re.compile(r"The pass key for the (\w+ \w+) is (\d{5})\.")


def test_cells_say_whether_the_answer_held_the_key(
    server: LiveServer, open_page: OpenPage, tokenizer: Tokenizer
) -> None:
    prompts: list[str] = []

    def answer(request: Generate) -> list[int]:
        detokenizer = tokenizer.detokenizer()
        prompts.append("".join(map(detokenizer.push, request.prompt)) + detokenizer.flush())
        [(_, key)] = KEY.findall(prompts[-1])
        return tokenizer.encode_here(f" {key}." if len(prompts) != 2 else " 1.", special=False)

    server.engine.answer = answer
    page = open_page(server.url)
    expect(page.locator("#needle-lengths")).to_have_text(" 1,024 4,096 16,384 65,536")
    unfold(page, "attention")
    page.uncheck("#needle-lengths input >> nth=2")
    page.select_option("#needle-depths", "3")
    page.click("#needle-run")
    expect(page.locator("#needle-run")).to_be_visible()
    expect(page.locator(".run figcaption")).to_have_text("dense: 5 of 6 found")
    cells = page.locator(".run td")
    assert [cells.nth(i).get_attribute("class") for i in range(6)] == ["found", "found", "missed", *["found"] * 3]
    cells.nth(2).get_by_role("button", name="1,024 tokens, depth 50%: not found").click()
    expect(page.locator(".details")).to_contain_text("The answer: “1.”")
    for request, prompt, (length, depth) in zip(
        server.engine.requests, prompts, [(n, d) for n in LENGTHS for d in (0, 0.5, 1)], strict=True
    ):
        assert 0.9 * length < len(request.prompt) + request.max_tokens < 1.02 * length
        needle = KEY.search(prompt)
        assert needle is not None
        assert abs(needle.start() / len(prompt) - depth) < 0.1
        assert f"What is the pass key for the {needle[1]}?" in prompt
    assert len({KEY.search(prompt)[2] for prompt in prompts}) > 4  # type: ignore[index]


def test_it_is_stopped_and_runs_again(server: LiveServer, open_page: OpenPage) -> None:
    server.engine.answer = lambda request: [7]
    page = open_page(server.url)
    unfold(page, "attention")
    for place in (1, 2):
        page.uncheck(f"#needle-lengths input >> nth={place}")
    server.engine.hold_prefill = True
    page.click("#needle-run")
    expect(page.locator(".run td.asking")).to_have_text("0%")
    page.keyboard.press("Escape")
    expect(page.locator(".run figcaption")).to_have_text("dense: none asked, stopped")
    eventually(lambda: server.idle)
    server.engine.hold_prefill = False
    page.click("#needle-run")
    expect(page.locator(".run figcaption").first).to_have_text("dense: 0 of 5 found")
    page.uncheck("#needle-lengths input >> nth=0")
    page.click("#needle-run")
    expect(page.locator("#needle-error")).to_have_text("Choose at least one length.")
