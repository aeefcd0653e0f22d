"""What can go wrong in a chat, in words for the person at the terminal."""

from __future__ import annotations

import httpx2 as httpx


class ChatError(Exception):
    """The server is not there, or refused or broke off what was asked; the message is for whoever types."""


def refusal(response: httpx.Response) -> str:
    """What an answer that is none says."""
    try:
        return response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"the server answered {response.status_code} without an error object"
