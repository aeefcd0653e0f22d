"""The least number of tokens that a text can have, known without encoding it.

No token stands for more than so many letters, digits, blanks, and so on. Count those of a text, and the tokens that it
needs at the least follow: a text that cannot fit is refused before anything is spent on it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from longreach.text.detokenizer import byte_alphabet

_BLANKS, _DIGITS = b" \t\r\n", b"0123456789"
_LETTERS = bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1))
_REST = bytes(byte for byte in range(128) if byte not in _BLANKS + _DIGITS + _LETTERS)
_HIGH = bytes(range(128, 256))
_LETTERS_OF_CLASSES = "wdlph"
_END = "\0"
_CLASSES = (_BLANKS, _DIGITS, _LETTERS, _REST, _HIGH)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# NFC may make one character of several: "e" and an accent are three bytes, "é" is two; no composition saves more.
_COMPOSED = 3


class Measure:
    """What the tokens of one tokenizer can hold at the most; made by `Measure.of`.

    A class of bytes has a weight such that no token weighs more than 1, so that a text's weight is at most the number
    of its tokens. The same with one weight for all bytes, by the longest token; the larger bound counts.

    Attributes:
        longest: bytes of the longest token.
    """

    def __init__(self, counts: list[tuple[int, ...]], composes: bool) -> None:
        self.longest = max(map(sum, counts), default=1) or 1
        most = [max(column) or math.inf for column in zip(*counts, strict=True)]
        heaviest = max(sum(n / m for n, m in zip(row, most, strict=True)) for row in counts)
        self._weights = [1 / (m * heaviest) for m in most]
        self._composes = composes

    @classmethod
    def of(cls, described: dict[str, Any]) -> Measure | None:
        """The measure of the tokenizer of a `tokenizer.json`; None where a token may stand for any amount of text."""
        if not _keeps_all(described):
            return None
        byte_level = "ByteLevel" in _kinds(described["pre_tokenizer"], "pretokenizers")
        # All at once: a vocabulary has a quarter of a million tokens, but few shapes of them.
        vocabulary = _END.join(described["model"]["vocab"])
        added = _END.join(token["content"] for token in described["added_tokens"])
        if byte_level:
            shapes = _shapes(vocabulary, byte_level=True)
        else:
            vocabulary, blanks = _BYTE_TOKEN.sub(" ", vocabulary).replace("▁", " "), added.replace("▁", " ")
            shapes = _shapes(_bytes(vocabulary)) | _shapes(_bytes(blanks))
        # Added tokens are written as they stand in a text, whatever the vocabulary makes of its bytes.
        shapes |= _shapes(_bytes(added))
        counts = {tuple(shape.count(letter) for letter in _LETTERS_OF_CLASSES) for shape in shapes}
        # A byte of any class may be a token of its own, in whatever form the vocabulary writes it.
        counts |= {tuple(int(index == one) for index in range(len(_CLASSES))) for one in range(len(_CLASSES))}
        return cls(list(counts), "NFC" in _kinds(described["normalizer"], "normalizers"))

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than these can stand for `text`."""
        data = text.encode("utf-8", "replace")
        # Cheap first: most texts are far from any bound by their length.
        weight = len(data) * min(1.0, max(self._weights))
        if weight >= 1:
            held = [len(data) - len(data.translate(None, members)) for members in _CLASSES]
            weight = max(len(data) / self.longest, sum(n * w for n, w in zip(held, self._weights, strict=True)))
        if self._composes and not text.isascii():
            weight /= _COMPOSED
        return math.floor(weight)


def _bytes(text: str) -> str:
    """A text as characters that are its bytes."""
    return text.encode().decode("latin-1")


def _shapes(tokens: str, byte_level: bool = False) -> set[str]:
    """The different tokens of those joined by `_END`, with the letter of its class for each byte."""
    return set(tokens.translate(_class_table(byte_level)).split(_END))


def _class_table(byte_level: bool) -> dict[int, str]:
    """For each character that stands for a byte the letter of its class."""
    table = {}
    alphabet = byte_alphabet() if byte_level else {byte: chr(byte) for byte in range(256)}
    for letter, members in zip(_LETTERS_OF_CLASSES, _CLASSES, strict=True):
        table |= {ord(alphabet[byte]): letter for byte in members if byte or byte_level}
    return table


def _keeps_all(described: dict[str, Any]) -> bool:
    """Whether every byte of a text is in one of its tokens: nothing is dropped, and no unknown stretch is one token."""
    model = described["model"]
    if model["type"] != "BPE" or any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"]):
        return False
    normalizers = _kinds(described["normalizer"], "normalizers")
    pretokenizers = _kinds(described["pre_tokenizer"], "pretokenizers")
    text = json.dumps([described["normalizer"], described["pre_tokenizer"]], ensure_ascii=False)
    return (
        normalizers <= {"NFC", "Prepend", "Replace"}
        and text.count('"Replace"') == text.count('{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}')
        and pretokenizers <= {"ByteLevel", "Split", "Digits", "Metaspace"}
        and '"Removed"' not in text
        and ("ByteLevel" in pretokenizers or model.get("byte_fallback", False))
    )


def _kinds(stage: dict[str, Any] | None, members: str) -> set[str]:
    if stage is None:
        return set()
    if stage["type"] == "Sequence":
        return set().union(*(_kinds(step, members) for step in stage[members]))
    return {stage["type"]}
