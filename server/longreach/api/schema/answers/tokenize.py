"""What `/tokenize` and `/detokenize` answer."""

from __future__ import annotations

import msgspec


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, how many, and how many could be."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """A text."""

    prompt: str
