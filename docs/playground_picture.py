"""Take the picture of the playground that the README shows.

    longreach serve                                  # the embedded model, in another terminal
    python docs/playground_picture.py                # writes docs/pictures/playground.png

Needs playwright (the dev extra) and chromium. The page shows what that server answers at that moment, times included.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Literal

from playwright.sync_api import expect, sync_playwright

PICTURE = Path(__file__).resolve().parent / "pictures" / "playground.png"
QUESTION = "What is the pass key for the silver lantern?"
MINUTES_MS = 300_000


def take(url: str, picture: Path, theme: Literal["light", "dark"], width: int) -> None:
    """Ask the example, run the needle test with exact and with windowed attention, ask again, and save the page."""
    expect.set_options(timeout=MINUTES_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        page.goto(url)
        page.click("#example")
        for question in (QUESTION, "What are all the signals for the supply boat?"):
            page.get_by_role("button", name=question).click()
            expect(page.locator("#ask")).to_be_visible()
        page.click("#needle-run")
        expect(page.locator("#needle-run")).to_be_visible()
        page.select_option("#policy", "window")
        page.get_by_role("spinbutton", name="size").fill("1024")
        expect(page.locator("#mask-words")).to_contain_text("tiles")
        page.click("#needle-run")
        expect(page.locator("#needle-run")).to_be_visible()
        page.get_by_role("button", name=QUESTION).click()
        expect(page.locator("#ask")).to_be_visible()
        page.locator(".run").first.locator("td.missed button").first.click()
        page.mouse.move(0, 0)
        page.evaluate("() => document.activeElement.blur()")
        page.screenshot(path=picture, full_page=True)
        browser.close()


def main() -> None:
    """Parse the arguments and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the PNG to write")
    parser.add_argument("--theme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=1280, help="of the window, in CSS pixels")
    asked = parser.parse_args()
    take(f"{asked.url.rstrip('/')}/", asked.out, asked.theme, asked.width)


if __name__ == "__main__":
    main()
