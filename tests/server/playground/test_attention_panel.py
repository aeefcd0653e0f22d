"""The chooser of attention policies: its fields, its picture, what requests carry, and what answers report."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.api.conftest import LiveServer
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import expect

from tests.server.playground.pages import ask, finished, unfold, upload

# How many of the picture's pixels have the colour of what is seen, or of what is skipped, and how many are empty.
COLOURS = """canvas => {
  const style = getComputedStyle(canvas);
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const counts = { seen: 0, skipped: 0, empty: 0, other: 0 };
  const [seen, skipped] = [style.color, style.borderTopColor].map(color => color.match(/\\d+/g).slice(0, 3).join());
  for (let i = 0; i < pixels.length; i += 4) {
    const color = pixels.slice(i, i + 3).join();
    counts[pixels[i + 3] === 0 ? "empty" : color === seen ? "seen" : color === skipped ? "skipped" : "other"] += 1;
  }
  return counts;
}"""
STREAM = (
    'data: {"choices":[{"delta":{"content":"4071"}}]}\n\n'
    'data: {"choices":[],"usage":{"prompt_tokens":900,"completion_tokens":1,'
    '"attention":{"policy":"window","density":0.125,"tiles_visited":1040,"tiles_skipped":7088,'
    '"kept_mass":{"queries":64,"mean":0.981,"p5":0.902,"min":0.611},'
    '"decode":{"tokens":9,"keys_visited":125,"keys_skipped":875,"missed_mass":{"mean":0.25,"max":0.5}}}}}\n\n'
    "data: [DONE]\n\n"
)


def test_a_policy_shows_its_mask_and_goes_into_requests(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url, policies=True, expected=("willReadFrequently",))
    expect(page.locator("#attention > summary")).to_have_text("Attention: exact change")
    expect(page.locator("#mask")).to_be_hidden()
    expect(page.locator("#mask-words")).to_have_text("Exact. At 32,768 tokens nothing is left out.")
    assert colours(page) == {"seen": 128 * 127 // 2, "other": 128, "skipped": 0, "empty": 128 * 127 // 2}
    unfold(page, "attention")
    page.select_option("#policy", "window")
    page.get_by_role("spinbutton", name="size").fill("1024")
    expect(page.locator("#mask-words")).to_contain_text("6.11% of what exact attention sees at 32,768 tokens")
    assert colours(page) == {"seen": 127, "other": 0, "skipped": 64 * 65 // 2 - 127, "empty": 64 * 63 // 2}
    page.click("#theme")
    assert colours(page)["seen"] == 127, "painted again in the other theme's colours"
    upload(page, "The owl. " * 900)
    expect(page.locator("#mask-words")).not_to_contain_text("32,768")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=STREAM))
    with page.expect_request("**/v1/chat/completions") as request:
        turn = ask(page, "Which key?")
    assert request.value.post_data_json["attention"] == {"policy": "window", "size": 1024, "sinks": 4}
    finished(page)
    expect(turn.locator(".about")).to_have_text("book.txt · window, size 1,024, sinks 4")
    expect(turn.locator(".left-out")).to_have_text(
        "Attention: window · 12.5% of it computed · 1,040 tiles visited, 7,088 skipped · "
        "keeps 98.1% of exact attention’s weight on average, 90.2% at the 5th percentile, 61.1% at least "
        "(on 64 sampled queries) · the answer read 12.5% of the keys and missed at most 25.0% of the weight on average"
    )
    page.click("#copy-python")
    expect(page.locator("#copied")).to_contain_text("Copied")
    program = page.evaluate("() => navigator.clipboard.readText()")
    assert 'extra_body={"attention": {"policy": "window", "size": 1024, "sinks": 4}}' in program


def test_what_a_policy_cannot_be_is_said(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url, policies=True, expected=("400",))
    unfold(page, "attention")
    page.select_option("#policy", "window")
    expect(page.locator("#mask-words")).to_contain_text("tiles")
    page.get_by_role("spinbutton", name="size").fill("0")
    expect(page.locator("#attention-error")).to_have_text("attention.size: give 1 to 1048576.")
    expect(page.locator("#mask")).to_be_hidden()
    page.get_by_role("spinbutton", name="size").fill("64")
    expect(page.locator("#attention-error")).to_be_hidden()
    expect(page.locator("#mask")).to_be_visible()


def test_a_policy_that_depends_on_the_text_has_no_picture(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url, policies=True, expected=("400",))
    unfold(page, "attention")
    page.select_option("#policy", "dynamic")
    expect(page.locator("#attention-error")).to_have_text("dynamic chooses by the prompt.")
    expect(page.locator("#attention-error")).not_to_have_class(re.compile("error"))
    expect(page.locator("#mask")).to_be_hidden()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=STREAM))
    for recall, estimator, carried in (("", "antidiagonal", {}), ("0.9", "pooled", {"recall": 0.9})):
        page.get_by_role("spinbutton", name="recall").fill(recall)
        page.get_by_label("estimator").select_option(estimator)
        with page.expect_request("**/v1/chat/completions") as request:
            ask(page, f"With {estimator}?")
        wanted = {"policy": "dynamic", "estimator": estimator} | carried
        assert request.value.post_data_json["attention"] == wanted
        finished(page)
    expect(page.get_by_label("density", exact=True)).to_be_disabled()
    page.get_by_role("radio", name="by density").check()
    expect(page.get_by_label("recall", exact=True)).to_be_disabled()
    page.get_by_role("spinbutton", name="density").fill("0.2")
    expect(page.locator("#attention-words")).to_have_text("dynamic, density 0.2, estimator pooled")
    expect(page.locator("#parameters")).not_to_contain_text("`")
    page.get_by_role("button", name="Copy as Python").click()
    expect(page.locator("#copied")).to_contain_text("Copied")
    program = page.evaluate("() => navigator.clipboard.readText()")
    assert '"attention": {"policy": "dynamic", "density": 0.2, "estimator": "pooled"}' in program


def test_without_policies_there_is_no_chooser(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server.url, expected=("404",))
    page.route("**/v1/attention/policies", lambda route: route.fulfill(status=404, json={"error": {"message": "no"}}))
    page.reload()
    expect(page.locator("#model")).to_contain_text("tiny-owl")
    ask(page, "Still?")
    finished(page)
    expect(page.locator("#attention")).to_be_hidden()
    assert len(server.engine.requests) == 1


def colours(page: Any) -> dict[str, int]:
    return page.locator("#mask").evaluate(COLOURS)
