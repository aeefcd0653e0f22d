"""List the sentences of the documentation that are hard to read, and fail if there is one.

    python scripts/hard_sentences.py              # README.md, the pages of docs/, and a few others
    python scripts/hard_sentences.py PAGE...      # these pages

A sentence has at most 30 words. Its subject is a noun: "Files of another model age, too", not "What another model left
ages, too". An expression in backticks is one word, and the address of a link does not count.

Code, tables and generated parts are left out. So are decision records, the development logs in docs/dev and the
training report: they are written once and not rewritten, and many are older than this rule.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 30

_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- (?!end)[^>]*-->\n.*?(?:<!-- end[^>]*-->|\Z)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_CODE = re.compile(r"``.+?``|`[^`]+`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?])[)*_\"”]*\s+(?=[\"“(*_\[]*(?:[A-Z0-9`]|cuDNN|vLLM|gpt-oss|longreach))")
_NO_NOUN = re.compile(r"(?:What|Who)\b")
_ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|etc|No|Fig|approx)\.")


def pages() -> list[Path]:
    """The pages that are held to the rule: those that users and contributors read."""
    names = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "server/longreach/default_model/README.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs and list items of a page, each in one line, with the number of its first line."""
    for pattern in (_FRONT_MATTER, _FENCE, _GENERATED, _COMMENT):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    first, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        apart = not stripped or stripped.startswith(("#", "|", "!["))
        if lines and (apart or _ITEM.match(line)):
            yield first, " ".join(lines)
            lines = []
        if not apart:
            first = first if lines else number
            lines.append(_ITEM.sub("", stripped).lstrip("> "))


def sentences(block: str) -> list[str]:
    """The sentences of a paragraph, without the addresses of links; code in backticks stands as one word."""
    text = _CODE.sub(lambda match: match[0].replace(" ", "\N{NO-BREAK SPACE}"), block)
    text = _LINK.sub(lambda match: match[1], text)
    text = _ABBREVIATIONS.sub(lambda match: match[1], text)
    return _END.split(text)


def words(sentence: str) -> int:
    """Words of a sentence: what stands between blanks and has a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in re.split(r"[ \t\n]+", sentence))


def faults(page: Path) -> list[tuple[int, str, str]]:
    """Line, fault and text of each sentence of a page that is hard to read."""
    found = []
    for line, block in blocks(page.read_text()):
        for sentence in sentences(block):
            if (count := words(sentence)) > MOST:
                found.append((line, f"{count} words", sentence))
            elif _NO_NOUN.match(sentence) and not sentence.rstrip("*_:)").endswith("?"):
                found.append((line, "no noun as its subject", sentence))
    return found


def main() -> None:
    """Print the sentences of the pages that are hard to read; the exit status is 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="by default all that are held to the rule")
    found = 0
    for page in parser.parse_args().pages or pages():
        for line, fault, sentence in faults(page):
            found += 1
            print(f"{page.resolve().relative_to(ROOT)}:{line}: {fault}: {sentence}")
    if found:
        sys.exit(f"{found} sentences are hard to read; state one fact in each, in at most 25 words, its subject first")


if __name__ == "__main__":
    main()
