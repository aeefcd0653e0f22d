"""What a client of a server says where nobody answers."""

from __future__ import annotations


def nobody_answers(url: object, error: Exception) -> str:
    """The message for people about an address at which there is no server, or another one, with the cure."""
    return (
        f"no OpenAI-compatible server answers at {url}: {error or type(error).__name__}; "
        "start one with `longreach serve`, or give another address"
    )
