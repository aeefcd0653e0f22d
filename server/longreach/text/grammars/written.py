"""How marks, and the texts between them, are written in a grammar."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

_BLANK = "[ \\t\\r\\n]*"


@dataclass(frozen=True)
class Written:
    """Writes marks as the tokens that they are, or as texts. Grammars know tokens by their ids alone: in texts they are
    not allowed, and a mark may always be spelled out, too.

    Attributes:
        token_ids: of all added tokens, by their texts.
        ends: ids of those that end an answer.
    """

    token_ids: Mapping[str, int] = field(default_factory=dict)
    ends: Collection[int] = ()

    def mark(self, mark: str) -> str:
        """A mark."""
        token = self.token_ids.get(mark)
        return literal(mark) if token is None else f"(<[{token}]> | {literal(mark)})"

    def end_of_text(self, name: str, mark: str) -> list[str]:
        """Rules, the first of this name, of a mark behind any text, which has to stand before it in a rule
        as `TEXT?` or, with the tokens that may stand in it, as `text*`."""
        token = self.token_ids.get(mark)
        if token is None:
            return [f"{name}[lazy]: {lazy(mark)}"]
        return [f"{name}: <[{token}]> | {name}_spelled", f"{name}_spelled[lazy]: {lazy(mark)}"]

    def others(self, marks: Iterable[str]) -> str | None:
        """Any of the added tokens but `marks` and those that end an answer; None if there are none."""
        without = {self.token_ids.get(mark) for mark in marks} | {*self.ends}
        ids = sorted({*self.token_ids.values()} - without)
        ranges: list[list[int]] = []
        for one in ids:
            if ranges and one == ranges[-1][1] + 1:
                ranges[-1][1] = one
            else:
                ranges.append([one, one])
        return f"<[{','.join(f'{first}-{last}' for first, last in ranges)}]>" if ranges else None


def literal(text: str) -> str:
    """A text."""
    return json.dumps(text, ensure_ascii=False)


def lazy(mark: str) -> str:
    """A regular expression, for a lazy rule, of any text up to a mark, with it."""
    return f"/(?s:.*){plain(mark)}/"


def plain(text: str) -> str:
    """A text in a regular expression."""
    return "".join(f"\\x{ord(one):02x}" if one.isascii() and not one.isalnum() else one for one in text)


def spaced(*texts: str) -> str:
    """A regular expression of texts with blank space before each."""
    return "".join(f"{_BLANK}{plain(text)}" for text in texts)
