"""Special tokens are written by a chat's template, and never by its messages.

A message may hold any text, a document that shows `<|im_end|>` included. Before a template is filled in, `guard` breaks
every special token in what it is filled with, by a character that no text can hold. What is still whole afterwards is
the template's own. `Tokenizer` then reads the broken ones as the plain text that they are.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

import tokenizers

# A lone surrogate: it is no character, so neither JSON nor UTF-8 can bring it in.
GUARD = "\ud800"


class Marks:
    """The special tokens of one tokenizer, as they are written."""

    def __init__(self, contents: Iterable[str]) -> None:
        longest_first = sorted({content for content in contents if content}, key=len, reverse=True)
        anywhere = "|".join(map(re.escape, longest_first))
        self._any = re.compile(anywhere) if longest_first else None
        self._broken = {mark: "".join(character + GUARD for character in mark) for mark in longest_first}
        self._own = re.compile(f"(?:{anywhere})(?!{GUARD})")
        # What is whole only together with the text behind it.
        self._beginnings = tuple({content[:end] for content in longest_first for end in range(1, len(content))})

    def within(self, texts: Iterable[str]) -> set[str]:
        """The special tokens that are written in `texts`."""
        return set() if self._any is None else {name for text in texts for name in self._any.findall(text)}

    def guard(self, value: Any) -> Any:
        """The same JSON-like value with every special token in its strings broken by `GUARD`."""
        if self._any is None:
            return value
        if isinstance(value, str):
            return self._guarded(value, self._any)
        if isinstance(value, dict):
            return {self.guard(name): self.guard(member) for name, member in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard(member) for member in value]
        return value

    def _guarded(self, text: str, any_mark: re.Pattern[str]) -> str:
        text = self.broken(text, any_mark)
        return text + GUARD if text.endswith(self._beginnings) else text

    def broken(self, text: str, any_mark: re.Pattern[str] | None = None) -> str:
        """A text with every special token broken that is whole in it; more may follow."""
        any_mark = any_mark or self._any
        return text if any_mark is None else any_mark.sub(lambda mark: self._broken[mark[0]], text)

    def growing_guard(self) -> GrowingGuard:
        """`guard` for a text that comes in parts."""
        return GrowingGuard(self)

    def unfinished(self, text: str) -> int:
        """Where the end of a text begins that may become a special token, or another one, by what follows."""
        if self._any is None or not text.endswith(self._beginnings):
            return len(text)
        longest = max(map(len, self._beginnings))
        ends = range(max(len(text) - longest, 0), len(text))
        at = next(at for at in ends if text[at:] in self._beginnings)
        # Not within a token that ends behind it: that one is found first.
        return next((mark.start() for mark in self._any.finditer(text) if mark.start() < at < mark.end()), at)

    def rename(self, text: str, names: dict[str, str]) -> str:
        """A text whose whole marks have other names, and whose broken ones are whole again."""
        return unguarded(self._own.sub(lambda mark: names[mark[0]], text))


class GrowingGuard:
    """Breaks the special tokens in a text that comes in parts: together they are what `Marks.guard` makes of it."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._rest = ""

    def feed(self, text: str) -> str:
        """The text goes on so; what of it is certain."""
        text = self._rest + text
        at = self._marks.unfinished(text)
        self._rest = text[at:]
        return self._marks.broken(text[:at])

    def end(self) -> str:
        """The text has ended; the rest of it."""
        rest, self._rest = self._rest, ""
        return self._marks.guard(rest)


def unguarded(text: str) -> str:
    """The text as it was meant."""
    return text.replace(GUARD, "")


def renamed(backend: tokenizers.Tokenizer) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
    """A tokenizer that reads special tokens as plain text and knows them by other, unguessable names; these; and the
    id of each by the one that it has there."""
    described = json.loads(backend.to_str())
    model, nonce = described["model"], secrets.token_hex(8)
    names: dict[str, str] = {}
    for token in described["added_tokens"]:
        if token["special"]:
            own, name = token["content"], f"\ufdd0{nonce}.{token['id']}\ufdd1"
            names[own] = token["content"] = name
            # In the vocabulary, too, where a text could find it.
            if isinstance(model["vocab"], dict) and own in model["vocab"]:
                model["vocab"][name] = model["vocab"].pop(own)
            if model.get("unk_token") == own:
                model["unk_token"] = name
    plain = tokenizers.Tokenizer.from_str(json.dumps(described))
    ids = {plain.token_to_id(token["content"]): token["id"] for token in described["added_tokens"]}
    return plain, names, {known: own for known, own in ids.items() if known is not None}
