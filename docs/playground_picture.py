"""Take the pictures of the playground that its page in the documentation shows.

    longreach serve                                  # the embedded model, in another terminal
    python docs/playground_picture.py                # writes docs/pictures/playground*.png

Needs playwright (the dev extra) and chromium. The pages show what that server answers at that moment, times included.
The picture of an answer with code has a text that is written below: the embedded model writes no code.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, expect, sync_playwright

PICTURES = Path(__file__).resolve().parent / "pictures"
QUESTION = "What is the pass key for the silver lantern?"
MINUTES_MS = 300_000
CODE_QUESTION = "How does the cache find what it has read, and what does it keep?"
FILES = {
    "cache/lookup.py": "def longest_prefix(pages, tokens):\n    ...\n" * 400,
    "cache/evict.py": "def evict(pages, wanted):\n    ...\n" * 400,
    "cache/poetry.lock": "...",
}
THOUGHT = "The two files are short. The lookup walks pages, the eviction frees the ends of prompts. "
ANSWER = '''The cache keeps **pages** of tokens. `longest_prefix` walks them from the first token on:

```python
def longest_prefix(pages, tokens):
    """The pages that begin `tokens`, and how many tokens they hold."""
    found = []
    for digest in digests(tokens):
        if digest not in pages:
            break
        found.append(pages[digest])
    return found, len(found) * PAGE_TOKENS
```

## What goes first

1. Pages of prompts that **nobody reads** now.
   - the *ends* of prompts before their beginnings
   - the oldest of them first
2. Nothing else: a page in use is never freed.

| file | function | called |
|---|---|---:|
| `cache/lookup.py` | `longest_prefix` | once a request |
| `cache/evict.py` | `evict` | when pages run out |
'''


def stream_of(text: str) -> str:
    """The events of a chat completion that thinks and then says `text`."""
    usage = {"prompt_tokens": 9_120, "prompt_tokens_details": {"cached_tokens": 9_088}}
    pieces = [text[i : i + 6] for i in range(0, len(text), 6)]
    deltas = [{"reasoning_content": THOUGHT}, *({"content": piece} for piece in pieces)]
    chunks = [
        {"choices": [{"delta": delta}], "usage": {**usage, "completion_tokens": count}}
        for count, delta in enumerate(deltas, start=1)
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def as_another_model(page: Page) -> None:
    """Let the page see a model that writes Markdown."""

    def models(route: Route) -> None:
        route.fulfill(json={"data": [{"id": "a-model-that-writes-code", "max_model_len": 131_072}]})

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=stream_of(ANSWER))

    page.route("**/v1/models", models)
    page.route("**/v1/documents*", lambda route: route.fulfill(json={"object": "list", "data": []}))
    page.route("**/v1/chat/completions", answer)


def ask_about_code(page: Page, url: str) -> None:
    """Open a few files as another model's page, and ask about them."""
    as_another_model(page)
    page.goto(url)
    expect(page.locator("#ask")).to_be_enabled()
    files: list[Any] = [
        {"name": name, "mimeType": "text/plain", "buffer": text.encode()} for name, text in FILES.items()
    ]
    page.set_input_files("#file", files)
    expect(page.locator("#book-size")).to_contain_text("tokens")
    page.fill("#question", CODE_QUESTION)
    page.press("#question", "Enter")
    finish(page)


def ask_the_example(page: Page, url: str) -> None:
    """Ask the example three questions, of which one has no answer."""
    page.goto(url)
    expect(page.locator("#ask")).to_be_enabled()
    page.click("#example")
    for question in (QUESTION, "What are all the signals for the supply boat?", "Who is the owner of the old chapel?"):
        page.get_by_role("button", name=question).click()
        finish(page)


def test_needles(page: Page) -> None:
    """Run the needle test with exact and with windowed attention."""
    page.click("#attention > summary")
    page.uncheck("#needle-lengths input >> nth=2")
    page.click("#needle-run")
    expect(page.locator("#needle-run")).to_be_visible()
    page.select_option("#policy", "window")
    page.get_by_role("spinbutton", name="size").fill("1024")
    expect(page.locator("#mask-words")).to_contain_text("tiles")
    page.click("#needle-run")
    expect(page.locator("#needle-run")).to_be_visible()
    page.locator(".run").first.locator("td.missed button").first.click()


def finish(page: Page) -> None:
    """Wait for the answer, and take the focus from the page."""
    expect(page.locator("#ask")).to_be_visible()
    page.mouse.move(0, 0)
    page.evaluate("() => document.activeElement.blur()")


def take(url: str, folder: Path) -> None:
    """Take all pictures."""
    expect.set_options(timeout=MINUTES_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        def open_page(width: int, height: int, theme: Any = "light") -> Page:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
            context.set_default_timeout(MINUTES_MS)
            return context.new_page()

        page = open_page(1280, 1020)
        ask_about_code(page, url)
        page.screenshot(path=folder / "playground-answer.png")
        page = open_page(390, 844, "dark")
        ask_about_code(page, url)
        page.screenshot(path=folder / "playground-phone.png")
        page = open_page(1280, 900)
        ask_the_example(page, url)
        page.screenshot(path=folder / "playground.png")
        page.click("#keep")
        expect(page.locator("#kept-list")).to_contain_text("cached")
        page.locator("section", has=page.locator("#kept")).first.screenshot(path=folder / "playground-documents.png")
        test_needles(page)
        page.locator(".side").evaluate("side => { side.style.maxHeight = 'none'; }")
        page.locator("#attention").screenshot(path=folder / "playground-attention.png")
        browser.close()


def main() -> None:
    """Parse the arguments and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--out", type=Path, default=PICTURES, help="the folder to write the pictures to")
    asked = parser.parse_args()
    take(f"{asked.url.rstrip('/')}/", asked.out)


if __name__ == "__main__":
    main()
