"""Where a text can be cut so that the tokens of its parts, put together, are the tokens of the whole.

A long text is encoded in pieces: what a piece takes of memory and time is bounded, a text that turns out too long is
given up on the way, and so is one that nobody waits for any more.

A cut stands behind a letter or digit and before a separator: a blank, a line's end, punctuation. It changes nothing if
neither of the tokenizer's two stages looks across it.

- The pre-tokenizer's expressions are matched from left to right. A run of letters or digits ends before a separator
  whatever follows, so a match begins there. Expressions that look back (`(?<=`, `^`, `\\b`) could tell the difference.
- The model joins only what some token of its vocabulary holds. A separator that any token has behind a letter or digit
  is not used.

Tokenizers of other kinds have no cuts. Whatever is found is tried on texts of many kinds before it is believed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from longreach.text.detokenizer import byte_alphabet

# Between letters and digits these end a run in every expression that language models use. An apostrophe does not
# ("don't" may be one match), nor does an underscore, which some count as a letter.
_SEPARATORS = ' \n\t!"#$%&()*+,-./:;<=>?@[\\]^{|}~、。，；：！？'
_END = "\0"  # no token has it: vocabularies write that byte in another way
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])+\]")
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[ABGKXZbz]|(?<!\\)[\^$]")
_LOCAL_NORMALIZERS = {"NFC", "Prepend", "Replace"}
_LOCAL_PRETOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "Split", "Whitespace", "WhitespaceSplit", "Punctuation"}

# What no tokenizer may treat differently in pieces. Every separator stands in it, mostly more than once.
_TRIALS = (
    "The pass key is 4,071; call (555) 0123-4567 or mail a.b@c.example, or don't! It's 12:30 o'clock.\n\nNext: x_y = 3",
    "def main(a, b):\n\treturn {'k1': [1,2,3], \"k2\": a[0] ** 2 != b}  # note\n\n\n    if a<b: ...;\r\nEND 1e-3",
    'level=info ts=2026-01-02T03:04:05Z msg="read 1234567 of 89012345" id=a1b2c3==x/y+z&q=1|2~3^4$5%6#7\\8',
    "Grüße aus Köln, wo 12 Bären über die Brücke gehen?Ja!Und dann… “so” — weiter. ÉCOLE déjà vu  doppelt   dreifach",
    "日本語の文字、そして絵文字🦉。數字123，以及English混排；問：好？答：好！完。 слова, ещё. العربية ١٢٣ نص",
    "aB cD eF\n gH\n\n  iJ\tkL\t\tmN  .oP ,qR  \n\tsT a  b   c ,d\n,e .f \n.g  \n h x1 2y 3.14 1,000,000.00 v1.2.3-rc4",
)


class Borders:
    """The cuts of one tokenizer's texts; made by `Borders.of`.

    `next` finds one. A part that begins with a blank may have to lose it, since the tokenizer adds one of its own:
    `begin` says where a part that follows a cut begins.
    """

    def __init__(self, separators: str, ascii_only: str, drops_blank: bool) -> None:
        anywhere = "".join(c for c in separators if c not in ascii_only)
        behind = {r"[^\W_]": anywhere, "[A-Za-z0-9]": ascii_only}
        # The blank that is put in front of a part takes the place of the one that it lost: before a word, and no token.
        ahead = r"(?=[^\W_])" if drops_blank else ""
        cuts = [f"(?<={left})[{re.escape(right)}]{ahead}" for left, right in behind.items() if right]
        self._cut = re.compile("|".join(cuts))
        self._drops_blank = drops_blank

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, described: dict[str, Any]) -> Borders | None:
        """The cuts of the texts of a tokenizer, given with its `tokenizer.json`; None if it is of a kind for which none
        are known to be safe."""
        if not _is_local(described):
            return None
        usable, ascii_only = _separators(described)
        for drops_blank in (False, True):
            # The tokenizer puts a blank in front of every part: only before a blank nothing is added by a cut.
            kept = " " if drops_blank else usable
            words = any(content[:1].isalnum() for content in _added(described))
            if not kept or kept not in usable or (drops_blank and words):
                continue
            borders = cls(kept, "".join(s for s in ascii_only if s in kept), drops_blank)
            if all(borders._holds(backend, text) for text in _TRIALS):
                return borders
        return None

    def next(self, text: str, start: int, least: int, most: int) -> int | None:
        """The first cut that leaves at least `least` and at most `most` characters behind `start`; the text's end if
        nothing more than `least` is left. None if there is no cut so near."""
        if len(text) - start <= least:
            return len(text)
        found = self._cut.search(text, start + least, min(len(text), start + most + 1))
        if found is not None:
            return found.start()
        return len(text) if len(text) - start <= most else None

    def first(self, text: str, start: int) -> int | None:
        """The first cut at `start` or behind it, whatever text may follow; None if there is none yet."""
        found = self._cut.search(text, max(start, 1))
        return None if found is None else found.start()

    def last(self, text: str) -> int | None:
        """The last cut of a text, whatever may follow it; None if there is none. Looks at all of it."""
        return max((found.start() for found in self._cut.finditer(text, 1)), default=None)

    def begin(self, text: str, cut: int) -> int:
        """Where the part behind a cut begins."""
        return cut + 1 if self._drops_blank and 0 < cut < len(text) else cut

    def _holds(self, backend: tokenizers.Tokenizer, text: str) -> bool:
        """Whether a text cut wherever it can be has the tokens of the whole."""
        parts, start = [], 0
        while start < len(text):
            cut = self.next(text, start, 1, len(text))
            assert cut is not None, "the end is near enough"
            parts.append(text[start:cut])
            start = self.begin(text, cut)
        ids: list[int] = []
        for encoding in backend.encode_batch_fast(parts, add_special_tokens=False):
            ids += encoding.ids
        return ids == backend.encode(text, add_special_tokens=False).ids


def _is_local(described: dict[str, Any]) -> bool:
    """Whether every stage of a tokenizer is of a kind that looks at nothing far away."""
    normalizers = list(_steps(described["normalizer"], "normalizers"))
    pretokenizers = list(_steps(described["pre_tokenizer"], "pretokenizers"))
    patterns = [_CLASS.sub("c", step["pattern"].get("Regex", "")) for step in pretokenizers if step["type"] == "Split"]
    return (
        described["model"]["type"] == "BPE"
        and {step["type"] for step in normalizers} <= _LOCAL_NORMALIZERS
        and all("String" in step["pattern"] for step in normalizers if step["type"] == "Replace")
        and {step["type"] for step in pretokenizers} <= _LOCAL_PRETOKENIZERS
        and not any(_LOOKS_BACK.search(pattern) for pattern in patterns)
        and not any(map(_reaches_over, described["added_tokens"]))
    )


def _reaches_over(token: dict[str, Any]) -> bool:
    """Whether an added token depends on, or takes, what stands behind a letter or digit beside it."""
    return token["single_word"] or (token["rstrip"] and token["content"][-1:].isalnum())


def _steps(stage: dict[str, Any] | None, members: str) -> Iterator[dict[str, Any]]:
    if stage is None:
        return
    if stage["type"] == "Sequence":
        for step in stage[members]:
            yield from _steps(step, members)
    else:
        yield stage


def _separators(described: dict[str, Any]) -> tuple[str, str]:
    """The separators that no token has behind a letter or digit, and those of them of which this is only known for
    ASCII ones: a token may begin within a character, of which one cannot tell what it was."""
    byte_level = any(step["type"] == "ByteLevel" for step in _steps(described["pre_tokenizer"], "pretokenizers"))
    written = _byte_level if byte_level else _sentence_piece
    vocabulary, added = _END.join(described["model"]["vocab"]), _END.join(_added(described))
    usable, ascii_only = "", ""
    for separator in _SEPARATORS:
        if any(character.isalnum() for character in _before(separator, added)):
            continue
        before = _before(written(separator), vocabulary)
        if any(character.isascii() and character.isalnum() for character in before):
            continue
        usable += separator
        if any(not character.isascii() and character not in _BLANKS for character in before):
            ascii_only += separator
    return usable, ascii_only


def _added(described: dict[str, Any]) -> list[str]:
    return [token["content"] for token in described["added_tokens"]]


def _before(part: str, tokens: str) -> set[str]:
    """The characters that stand before `part` in any of `tokens`, which are joined by `_END`."""
    found, at = set(), tokens.find(part, 1)
    while at > 0:
        found.add(tokens[at - 1])
        at = tokens.find(part, at + 1)
    return found - {_END}


def _sentence_piece(separator: str) -> str:
    return "▁" if separator == " " else separator


def _byte_level(separator: str) -> str:
    return "".join(_ALPHABET[byte] for byte in separator.encode())


_ALPHABET = byte_alphabet()
_BLANKS = "▁" + _byte_level(" \n\t\r")
