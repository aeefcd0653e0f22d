"""Documents that the server keeps, on the page: kept, listed, asked about by reference, and deleted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.api.conftest import LiveServer
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import Page, expect

from tests.server.playground.pages import ask, finished, unfold, upload
from tests.server.playground.test_access import FAINT

BOOK = "The pass key is 4071. " * 40


def keep(server: LiveServer, name: str, **more: Any) -> str:
    body = {"text": f"{name}: {BOOK}", "name": name, "use": "chat", "wait": True, **more}
    return server.http.post("/v1/documents", json=body).json()["id"]


def body_of(page: Page, question: str) -> dict[str, Any]:
    """What the page sends for a question."""
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, question)
    finished(page)
    return json.loads(request.value.post_data or "")


def test_a_document_is_kept_once_and_asked_about_by_reference(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    expect(page.locator("#kept")).to_be_hidden()
    upload(page, BOOK, "key.txt")
    whole = body_of(page, "Which?")
    assert BOOK in whole["messages"][0]["content"]
    page.click("#keep")
    expect(page.locator("#is-kept")).to_be_visible()
    expect(page.locator("#keep")).to_be_hidden()
    item = page.locator("#kept-list li")
    expect(item).to_have_count(1)
    expect(item).to_contain_text("key.txt")
    [kept] = server.http.get("/v1/documents").json()["data"]
    assert (kept["name"], kept["bytes"], kept["use"]) == ("key.txt", len(BOOK), "chat")
    expect(item).to_contain_text("tokens")
    short = body_of(page, "And now?")
    assert short["document"] == kept["id"]
    assert [message["content"] for message in short["messages"]][0::2] == ["Which?", "And now?"], "it goes on"
    page.click("#copy-python")
    expect(page.locator("#copied")).to_contain_text("Copied as Python")
    assert (
        f'"document": "{kept["id"]}"' in page.evaluate("() => navigator.clipboard.readText()").split("extra_body=")[1]
    )
    # The answer echoes the prompt, and its words are looked for in the text, which the page still has.
    expect(page.locator("#book-beginning")).to_contain_text("The pass key is 4071.")


def test_a_kept_document_is_chosen_from_the_list_and_deleted(server: LiveServer, open_page: OpenPage) -> None:
    first, second = keep(server, "a.txt"), keep(server, "b <i>.txt", pin=True)
    page = open_page(server.url, expected=("404",))
    items = page.locator("#kept-list li")
    expect(items).to_have_count(2)
    expect(items.first).to_contain_text("b <i>.txt")
    expect(items.first).to_contain_text("pinned")
    page.get_by_role("button", name="Ask about a.txt").click()
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator("#book-name")).to_have_text("a.txt")
    expect(page.locator("#pages")).to_be_hidden()
    expect(page.locator("#gauge-words")).to_contain_text("of the 65,536 tokens")
    assert body_of(page, "Which?")["document"] == first
    remove = page.get_by_role("button", name="Delete a.txt")
    remove.click()
    expect(remove).to_have_text("Really?")
    assert server.http.get(f"/v1/documents/{first}").status_code == 200
    remove.click()
    expect(items).to_have_count(1)
    assert server.http.get(f"/v1/documents/{first}").status_code == 404
    expect(page.locator("#drop")).to_be_visible()
    page.get_by_role("button", name="Ask about b <i>.txt").click()
    server.http.delete(f"/v1/documents/{second}")
    turn = ask(page, "Is it there?")
    expect(turn.locator(".error")).to_contain_text("There is no document")
    expect(page.locator("#drop")).to_be_visible()
    expect(page.locator("#kept")).to_be_hidden()


def test_a_text_completion_begins_with_the_document(server: LiveServer, open_page: OpenPage) -> None:
    keep(server, "a.txt", use="completion")
    page = open_page(server.url)
    page.get_by_role("button", name="Ask about a.txt").click()
    unfold(page, "settings")
    page.select_option("#form", "plain")
    with page.expect_request("**/v1/completions") as request:
        ask(page, "Which?")
    finished(page)
    sent = json.loads(request.value.post_data or "")
    assert sent["prompt"] == "\nWhich?\nAnswer:"
    assert sent["document"].startswith("doc-")


CACHE = {
    **{tier: {"tokens": tokens, "bytes": 1} for tier, tokens in (("gpu", 300), ("host", 200), ("disk", 500))},
    "seconds_to_read": 4.25,
}


def test_where_a_document_is_cached_is_shown_and_read_by_everybody(server: LiveServer, open_page: OpenPage) -> None:
    keep(server, "a long name without a blank " + "x" * 200)
    page = open_page(server.url, width=390)

    def told(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "tokens": 1000, "cache": CACHE})

    page.route("**/v1/documents/doc-*", told)
    page.reload()
    expect(page.locator("#kept-list li")).to_contain_text(
        "cached: GPU 30.0%, memory 20.0%, disk 50.0% · 4.3 s to read again"
    )
    for _ in ("light", "dark"):
        assert page.evaluate(FAINT) == []
        page.click("#theme")
        page.wait_for_timeout(50)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


def test_a_server_without_documents_shows_nothing_of_them(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url, expected=("404",))
    page.route("**/v1/documents*", lambda route: route.fulfill(status=404, json={"detail": "Not Found"}))
    page.reload()
    upload(page, BOOK, "key.txt")
    expect(page.locator("#keep")).to_be_hidden()
    expect(page.locator("#kept")).to_be_hidden()


def test_what_cannot_be_kept_is_told(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url, expected=("400",))
    upload(page, BOOK, "doc-like.txt")
    page.click("#keep")
    expect(page.locator("#document-error")).to_contain_text("must not begin with")
    expect(page.locator("#keep")).to_be_enabled()
    expect(page.locator("#kept")).to_be_hidden()
