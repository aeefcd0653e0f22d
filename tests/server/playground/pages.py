"""What a reader does on the playground, in a word each."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

# Texts are compared where they are: the page's policy forbids evaluating strings as code.


def upload(page: Page, text: str | bytes, name: str = "book.txt") -> None:
    """Choose a file with this text, and wait until its tokens are counted."""
    choose(page, text, name)
    expect(page.locator("#book-size")).to_contain_text("tokens")


def choose(page: Page, content: str | bytes, name: str) -> None:
    """Choose a file."""
    data = content.encode() if isinstance(content, str) else content
    page.set_input_files("#file", {"name": name, "mimeType": "text/plain", "buffer": data})


def ask(page: Page, question: str) -> Any:
    """Write a question and send it; its turn on the page."""
    expect(page.locator("#ask")).to_be_enabled()
    count = page.locator(".turn").count()
    page.fill("#question", question)
    page.press("#question", "Enter")
    expect(page.locator(".turn")).to_have_count(count + 1)
    turn = page.locator(".turn").nth(count)
    expect(turn.locator("h3")).to_have_text(question)
    return turn


def unfold(page: Page, part: str) -> None:
    """Open the settings or the attention."""
    page.click(f"#{part} > summary")


def finished(page: Page) -> None:
    """Wait until no question is being answered."""
    expect(page.locator("#stop")).to_be_hidden()
