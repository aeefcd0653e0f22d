"""The request that the log offers once a server is ready: a line to paste into a shell of the same machine."""

from __future__ import annotations

import json
import shlex
from typing import Any

# The embedded model finds facts that a text states, so the text states one.
_KEY = "48213"
_NEEDLE = (
    "The ferry leaves at noon. The pass key for the silver lantern is 48213. The harbour is closed on Mondays.\n"
    "What is the pass key for the silver lantern?\nAnswer:"
)


def first_request(url: str, model: str, *, embedded: bool, has_chat: bool, needs_key: bool) -> tuple[str, str | None]:
    """A curl command that asks `model` what it can answer, and the answer where that is known.

    Args:
        url: what the server listens on.
        embedded: the embedded model is served, under whatever name.
        has_chat: the model has a chat template; without one it continues a text.
        needs_key: requests need an API key. The command has `KEY` in its place.
    """
    body: dict[str, Any] = {"model": model}
    if embedded:
        path = "completions"
        body |= {"prompt": _NEEDLE, "max_tokens": 16, "temperature": 0}
    elif has_chat:
        path = "chat/completions"
        body |= {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 256, "stream": True}
    else:
        path = "completions"
        body |= {"prompt": "The three longest rivers are", "max_tokens": 32, "stream": True}
    words = ["curl"]
    if body.get("stream"):
        words.append("-N")
    if url.startswith("https:"):  # a certificate is for a name, and this is an address of this machine
        words.append("--insecure")
    words += [f"{_reachable(url)}/v1/{path}", "-H", "Content-Type: application/json"]
    if needs_key:
        words += ["-H", "Authorization: Bearer KEY"]
    return shlex.join([*words, "-d", json.dumps(body)]), _KEY if embedded else None


def _reachable(url: str) -> str:
    """The URL with an address that one can connect to, where the server listens on all of them."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
