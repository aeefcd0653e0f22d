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


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The members of the model's `tokenizer_config.json`, with these: the chat template, and special tokens as text."""

    tokenizer_class: str
    chat_template: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
