"""Answers that a grammar accepts: what the model wants to write if it can, and otherwise something short."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from tests.clients.tool_use import sample

_MOST_BYTES = 20_000
# Tokens that a grammar names by their ids, beside texts: bytes, of which answers are written here, have none.
_SPECIAL = re.compile(r"<\[[\d,-]+\]> \| | \| <\[[\d,-]+\]>")
# Where several bytes may come next: those that end something, then a digit, then a letter.
_PREFERRED = b'"}])>,:0123456789abcdefghijklmnopqrstuvwxyz'


def constrained(grammar: str, words: str, calls: list[tuple[str, Any]], written: list[str]) -> str:
    """A sentence of `grammar` (llguidance's form): the first of the likely ones that it accepts, or any other.

    Raises:
        ValueError: the grammar cannot be used, or has no short sentence.
    """
    start = LLMatcher(LLTokenizer("byte"), _SPECIAL.sub("", grammar), log_level=0)
    if start.is_error():
        raise ValueError(f"the grammar cannot be used: {start.get_error()}")
    for text in _likely(grammar, words, calls, written):
        matcher = start.deep_copy()
        if matcher.consume_tokens(list(text.encode())) and matcher.is_accepting():
            return text
    return _any_sentence(start)


def _likely(grammar: str, words: str, calls: list[tuple[str, Any]], written: list[str]) -> Iterator[str]:
    if calls:
        yield from written
        yield _json([{"name": name, "parameters": arguments} for name, arguments in calls])
        yield _json([{"name": name, "arguments": arguments} for name, arguments in calls])
        yield from (_json(arguments) for _, arguments in calls)
    # Words before schemas: a grammar of tools that may be called has their schemas, and is free otherwise.
    yield from written
    yield words
    for schema in _schemas(grammar):
        yield _json(sample(schema, words))


def _schemas(grammar: str) -> Iterator[Any]:
    """The JSON schemas in a grammar, those within Lark text included."""
    try:
        parts = json.loads(grammar)["grammars"]
    except json.JSONDecodeError:  # Lark text as it is
        parts = [{"lark_grammar": grammar}]
    for part in parts:
        if "json_schema" in part:
            yield part["json_schema"]
        for behind in part.get("lark_grammar", "").split("%json")[1:]:
            yield json.JSONDecoder().raw_decode(behind.lstrip())[0]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _any_sentence(matcher: LLMatcher) -> str:
    out = bytearray()
    while not matcher.is_accepting():
        mask = matcher.compute_bitmask()
        allowed = {token for token in range(256) if mask[token >> 3] & (1 << (token & 7))}
        if not allowed or len(out) > _MOST_BYTES:
            raise ValueError(f"the grammar has no short sentence that begins with {bytes(out[:200])!r}")
        chosen = next((byte for byte in _PREFERRED if byte in allowed), min(allowed))
        matcher.consume_token(chosen)
        out.append(chosen)
    return out.decode(errors="replace")
