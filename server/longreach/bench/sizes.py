"""Sizes of a load as text: 16k tokens, batches of 16x16k."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from longreach.config import Tokens

from .load import Load

_TOKENS = TypeAdapter(Tokens)


def load_of(**sizes: Any) -> Load:
    """A `Load` of which some sizes are given as text.

    Raises:
        ValueError: one is not a positive number, or not written as it should be; the message names its flag.
    """
    for name in ("lengths", "batches"):
        if name in sizes:
            parts = [part for part in sizes[name].split(",") if part]
            sizes[name] = tuple(_batch(part) if name == "batches" else _tokens(name, part) for part in parts)
    if "long_prompt" in sizes:
        sizes["long_prompt"] = _tokens("long_prompt", sizes["long_prompt"])
    for name, value in sizes.items():
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{_flag(name)}: give a positive number, got {value}")
    if sizes.get("max_tokens", 2) < 2:
        raise ValueError("--max-tokens: give at least 2, so that there is a delay between tokens")
    return Load(**sizes)


def _batch(text: str) -> tuple[int, int]:
    count, x, length = text.partition("x")
    if not x or not count.isdecimal() or int(count) < 1:
        raise ValueError(f"--batches: give requests x tokens, as in 16x16k, got {text!r}")
    return int(count), _tokens("batches", length)


def _tokens(name: str, text: str) -> int:
    try:
        value = _TOKENS.validate_python(text)
    except ValidationError as error:
        raise ValueError(f"{_flag(name)}: {error.errors()[0]['msg']}, got {text!r}") from None
    if value < 1:
        raise ValueError(f"{_flag(name)}: give a positive number of tokens, got {text!r}")
    return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
