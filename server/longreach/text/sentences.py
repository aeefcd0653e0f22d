"""Sentences of a text, found by their ends, and excerpts that end where sentences or words do. Knows no language."""

from __future__ import annotations

import re
from typing import NamedTuple

_SENTENCE = re.compile(r"\S[^\n]*?(?:[.!?…]+[\"'”’)\]*_`]*(?=\s|$)|[。！？]+|(?=\n)|$)")
_END = re.compile(r"[.!?…]+[\"'”’)\]*_`]*\s+|[。！？]+\s*|\n\s*")
# How far an excerpt is widened on either side to the end of a sentence, in characters.
_WIDENED = 80


class Stretch(NamedTuple):
    """Characters `start` to `end` of a text."""

    start: int
    end: int


def sentences(text: str) -> list[Stretch]:
    """The sentences and lines of a text, without the blanks between them. A decimal point ends none."""
    return [Stretch(*match.span()) for match in _SENTENCE.finditer(text)]


def excerpt(text: str, start: int, end: int, most: int) -> Stretch:
    """The stretch of at most `most` characters around those from `start` to `end`: widened to whole sentences where
    these end close by, else to whole words, and without blanks around it."""
    low, high = max(0, start - _WIDENED), min(len(text), end + _WIDENED)
    *_, before = [0 if low == 0 else None, *(match.end() for match in _END.finditer(text, low, start))]
    if before is None:
        before = _word_start(text, start, low)
    behind = _END.search(text, end, high)
    if behind is not None:
        after = behind.end()
    else:
        after = high if high == len(text) else _word_end(text, end, high)
    if after - before > most:  # the place itself comes first
        before = max(before, min(start, after - most))
        after = min(after, before + most)
    while before < after and text[before].isspace():
        before += 1
    while after > before and text[after - 1].isspace():
        after -= 1
    return Stretch(before, after)


def _word_start(text: str, at: int, low: int) -> int:
    while at > low and not text[at - 1].isspace():
        at -= 1
    return at


def _word_end(text: str, at: int, high: int) -> int:
    while at < high and not text[at].isspace():
        at += 1
    return at
