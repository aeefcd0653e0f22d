"""A browser for the playground, and a server without a model behind it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.api.conftest import _servers_end_at_once, make_server, server  # noqa: F401 - fixtures
from tests.server.playground.policies import answer_policies

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_MS = 60_000

OpenPage = Callable[..., Any]


# Not for the session: Playwright keeps an event loop running in this thread, where other tests start their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; its tests are skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
    path = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    sync_api.expect.set_options(timeout=_TIMEOUT_MS)
    with sync_api.sync_playwright() as playwright:
        # Its sandbox needs rights that containers do not give; the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Open the playground of a server; at the end of the test nothing may stand in its pages' consoles.

    `width` and `theme` are the window's, `policies` puts the endpoints of `policies.py` in the server's place, and
    `expected` are parts of lines that the console may have.
    """
    contexts, told = [], []

    def start(
        url: str, *, width: int = 1280, theme: str = "light", policies: bool = False, expected: tuple[str, ...] = ()
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        contexts.append(context)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        page = context.new_page()
        page.set_default_timeout(_TIMEOUT_MS)

        def note(line: str) -> None:
            if not any(part in line for part in expected):
                told.append(line)

        page.on("console", lambda message: note(f"{message.type}: {message.text} {message.location['url']}"))
        page.on("pageerror", lambda error: note(f"uncaught: {error}"))
        if policies:
            page.route("**/v1/attention/**", answer_policies)
        page.goto(f"{url}/")
        return page

    yield start
    for context in contexts:
        context.close()
    assert not told
