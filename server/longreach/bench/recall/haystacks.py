"""Long texts that every machine has, to hide facts in: made stories, Python's language reference, and its sources."""

from __future__ import annotations

import importlib
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from longreach.bench.recall.sampler import sentences

HAYSTACKS = ("story", "docs", "code")


def lines_of(name: str, rng: random.Random) -> Iterator[str]:
    """Endless pieces of a text, which joined are the text: a fact may stand between any two of them.

    They begin at a place that `rng` draws, and from the end they go on at the beginning. Of `docs` and `code` the text
    is that of the Python that runs.

    Raises:
        ValueError: this Python was installed without its reference or its sources.
    """
    if name == "story":
        yield from sentences(rng)
    lines = _docs() if name == "docs" else _code()
    start = rng.randrange(len(lines))
    while True:
        yield from lines[start:]
        start = 0


@cache
def _docs() -> tuple[str, ...]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise _missing("docs", "reference") from None
    return _lines("\n\n".join(topics[name] for name in sorted(topics)))


@cache
def _code() -> tuple[str, ...]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    if not files:
        raise _missing("code", "sources")
    return _lines("\n\n".join(file.read_text(encoding="utf-8") for file in files))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.splitlines(keepends=True))


def _missing(name: str, what: str) -> ValueError:
    return ValueError(f"--haystacks: {name}: this Python was installed without its {what}: use --haystacks story")
