"""The page for everybody: by keyboard, in both themes, on a phone, with enough contrast."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pairwise import covering
from tests.server.api.conftest import LiveServer, eventually
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import expect

from tests.server.playground.pages import ask, finished, unfold

# Texts whose contrast with what is behind them is below WCAG's AA (4.5 to 1; 3 to 1 for large or disabled ones).
FAINT = """() => {
  const parse = color => color.match(/[\\d.]+/g).map(Number);
  const luminance = rgb => {
    const [r, g, b] = rgb.map(c => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(node).backgroundColor);
      if (a > 0) return [r, g, b];
    }
  };
  const faint = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    const isSeen = node.checkVisibility({ visibilityProperty: true }) && !node.closest("noscript");
    if (!isSeen || !texts.currentNode.data.trim()) continue;
    const style = getComputedStyle(node);
    const [high, low] = [luminance(parse(style.color).slice(0, 3)), luminance(behind(node))].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const isEasy = parseFloat(style.fontSize) >= 24 || node.closest(":disabled");
    if (ratio < (isEasy ? 3 : 4.5)) faint.push(`${node.tagName} ${texts.currentNode.data.trim()} ${ratio.toFixed(2)}`);
  }
  return faint;
}"""
FOCUSED = """() => {
  const node = document.activeElement;
  const style = getComputedStyle(node);
  const name = node.id || node.value || node.textContent.trim();
  return { name, outline: style.outlineStyle, width: parseFloat(style.outlineWidth) };
}"""
CONTROLS = """() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary")]
  .filter(node => node.checkVisibility() && !node.disabled)
  .map(node => node.id || node.value || node.textContent.trim())"""


@pytest.mark.parametrize(("theme", "width"), covering(["light", "dark"], [1280, 390], strength=1))
def test_themes_and_widths(server: LiveServer, open_page: OpenPage, theme: str, width: int) -> None:
    page = open_page(server.url, theme=theme, width=width, policies=True, expected=("400",))
    page.click("#example")
    expect(page.locator("#book-size")).to_contain_text("tokens")
    ask(page, "long" * 60)
    finished(page)
    unfold(page, "settings")
    unfold(page, "attention")
    page.select_option("#policy", "dynamic")
    for other in (False, True):
        if other:
            page.click("#theme")
        is_dark = (theme == "dark") != other
        page.wait_for_timeout(50)
        background = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 384) == is_dark
        assert page.evaluate(FAINT) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light" if theme == "dark" else "dark")


def test_everything_is_reached_and_done_by_keyboard(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url, policies=True)
    expect(page.locator("#mask-words")).to_contain_text("tokens")
    unfold(page, "attention")
    page.locator(".skip").focus()
    press_until(page, "example")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator("#book-size")).to_contain_text("tokens")
    page.keyboard.type("What is the pass key for the silver lantern?")
    server.engine.hold_prefill = True
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_have_value("")
    expect(page.locator(".reading-words")).to_contain_text("tokens read")
    page.keyboard.press("Escape")
    finished(page)
    expect(page.locator(".turn .note")).to_have_text("Stopped.")
    eventually(lambda: server.idle)
    wanted = set(page.evaluate(CONTROLS))
    page.locator(".skip").focus()
    seen = [page.evaluate(FOCUSED)["name"]]
    for _ in range(len(wanted) + 5):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        if focused["name"] in wanted:
            assert focused["outline"] != "none", focused
            assert focused["width"] >= 2, focused
            seen.append(focused["name"])
    assert set(seen) == wanted
    order = [seen.index(name) for name in ("replace", "policy", "needle-run", "question", "ask")]
    assert order == sorted(order)


def press_until(page: Any, name: str) -> None:
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED)["name"] == name:
            return
    raise AssertionError(f"{name} is not reached")
