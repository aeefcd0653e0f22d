"""The conversation on the page: edited, asked again, followed, kept over a reload, saved as a file, and forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.conftest import LiveServer
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import Page, Route, expect

from tests.server.playground.pages import ask, finished, unfold, upload


def answering(page: Page, *answers: str) -> list[dict[str, Any]]:
    """Let questions be answered by these texts, one after the other; what was sent is in the list."""
    sent: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        sent.append(route.request.post_data_json)
        chunk = {"choices": [{"delta": {"content": answers[(len(sent) - 1) % len(answers)]}}]}
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        body = f"data: {json.dumps({**chunk, 'usage': usage})}\n\ndata: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/**completions", answer)
    return sent


def said(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_questions_are_edited_and_answers_regenerated(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    sent = answering(page, *"ABCDEFG")
    for question in ("one?", "two?", "three?"):
        ask(page, question)
        finished(page)
    assert said(sent[2]) == ["one?", "A", "two?", "B", "three?"]
    turns = page.locator(".turn")
    turns.nth(2).get_by_role("button", name="Regenerate").click()
    expect(turns.nth(2).locator(".answer")).to_have_text("D")
    assert said(sent[3]) == said(sent[2]), "the answer that goes does not count"
    turns.nth(1).get_by_role("button", name="Edit").click()
    field = turns.nth(1).get_by_label("The question")
    expect(turns.nth(1)).to_contain_text("Removes the question below.")
    field.press("Escape")
    expect(turns.nth(1).locator("h3")).to_have_text("two?")
    turns.nth(1).get_by_role("button", name="Edit").click()
    field.fill("second?")
    field.press("Enter")
    finished(page)
    expect(turns).to_have_count(2)
    expect(turns.nth(1).locator(".answer")).to_have_text("E")
    assert said(sent[4]) == ["one?", "A", "second?"]
    again = turns.nth(0).locator(".again")
    again.click()
    expect(again).to_have_text("Also remove the question below?")
    again.click()
    expect(turns.nth(0).locator(".answer")).to_have_text("F")
    expect(turns).to_have_count(1)
    unfold(page, "settings")
    page.uncheck("#remember")
    ask(page, "four?")
    finished(page)
    turns.nth(0).locator(".again").click()
    expect(turns.nth(0).locator(".answer")).to_have_text("A")
    expect(turns).to_have_count(2)
    assert said(sent[-1]) == ["one?"]


def test_settings_go_into_requests(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    sent = answering(page, "Yes.")
    ask(page, "Bare?")
    finished(page)
    assert not {"temperature", "top_p", "stop"} & set(sent[0])
    assert sent[0]["max_completion_tokens"] == 4096
    unfold(page, "settings")
    for field, value in (("system", "Be brief."), ("temperature", "0"), ("top-p", "0.9"), ("stop-words", "END\n\nQ:")):
        page.fill(f"#{field}", value)
    ask(page, "Set?")
    finished(page)
    assert said(sent[1]) == ["Be brief.", "Bare?", "Yes.", "Set?"]
    assert (sent[1]["temperature"], sent[1]["top_p"], sent[1]["stop"]) == (0, 0.9, ["END", "Q:"])
    page.select_option("#form", "plain")
    expect(page.locator("#system")).to_be_hidden()
    ask(page, "Plain?")
    finished(page)
    assert (sent[2]["prompt"], sent[2]["max_tokens"]) == ("Plain?\nAnswer:", 4096)
    page.reload()
    ask(page, "Kept?")
    finished(page)
    assert (sent[3]["prompt"], sent[3]["top_p"]) == ("Kept?\nAnswer:", 0.9)


def test_a_reload_keeps_all_until_it_is_forgotten(server: LiveServer, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(server.url)
    sent = answering(page, "It is **4071**.", "Yes.", "No.")
    upload(page, "The pass key is 4071. " * 20)
    ask(page, "Which?")
    finished(page)
    expect(page.locator("#stored")).to_contain_text("until you forget them")
    kept = """async () => {
      const { load } = await import("/playground/store.js");
      return (await load("conversation"))?.turns.map(({ answer }) => answer) ?? [];
    }"""
    for _ in range(1200):  # it is kept in a moment
        if page.evaluate(kept) == ["It is **4071**."]:
            break
        page.wait_for_timeout(50)
    page.reload()
    turn = page.locator(".turn")
    expect(turn.locator("strong")).to_have_text("4071")
    expect(page.locator("#book-name")).to_have_text("book.txt")
    ask(page, "Sure?")
    finished(page)
    assert said(sent[1])[0].startswith("The pass key is 4071.")
    assert said(sent[1])[1:] == ["It is **4071**.", "Sure?"]
    with page.expect_download() as saved:
        page.click("#export-markdown")
    saved.value.save_as(tmp_path / "a.md")
    assert "## Which?\n\n*book.txt*\n\nIt is **4071**.\n\n## Sure?" in (tmp_path / "a.md").read_text()
    with page.expect_download() as saved:
        page.click("#export-json")
    saved.value.save_as(tmp_path / "a.json")
    told = json.loads((tmp_path / "a.json").read_text())
    assert [turn["answer"] for turn in told["turns"]] == ["It is **4071**.", "Yes."]
    assert told["document"] == {"name": "book.txt", "characters": 440, "kept": None}
    page.click("#forget")
    with page.expect_navigation():
        page.get_by_role("button", name="Really forget?").click()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator("#drop")).to_be_visible()
    assert page.evaluate(kept) == []


def test_the_page_follows_what_is_written_unless_it_is_scrolled(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    answering(page, "A line.\n\n" * 60)
    at_end = "() => document.documentElement.scrollHeight - innerHeight - scrollY < 80"
    ask(page, "One?")
    finished(page)
    assert page.evaluate(at_end)
    page.unroute("**/v1/**completions")
    server.engine.hold_decode_after = 3
    turn = ask(page, "Two?")
    expect(turn.locator(".answer")).to_contain_text("User")
    assert page.evaluate(at_end)
    page.evaluate("() => scrollTo(0, 0)")
    page.wait_for_timeout(50)
    server.engine.hold_decode_after = None
    expect(page.locator("#newest")).to_be_visible()
    page.click("#newest")
    expect(page.locator("#newest")).to_be_hidden()
    assert page.evaluate(at_end)


def test_not_stated_is_no_fact_about_the_text(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url)

    def described(route: Route) -> None:
        answer = route.fetch()
        [model] = answer.json()["data"]
        route.fulfill(json={"data": [{**model, "description": "This is the demonstration model."}]})

    page.route("**/v1/models", described)
    page.reload()
    answering(page, " Not stated.", "48213")
    expect(page.locator("#description")).to_have_text("This is the demonstration model.")
    note = ask(page, "Who?").locator(".note")
    expect(note).to_have_text("This is the demonstration model’s usual answer. It says nothing about your text.")
    finished(page)
    expect(ask(page, "Which?").locator(".note")).to_be_hidden()
