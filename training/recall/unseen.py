"""Text of kinds that training never uses: other languages, programs, logs, an old-fashioned novel.

What a fact costs to find in them shows whether a model reads facts or has learnt its filler by heart.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from training.recall import vocabulary as v
from training.recall.phrasings import capital
from training.recall.tables import load
from training.recall.vocabulary import Lexicon

_TABLES = load("unseen")
_SLOT = re.compile(r"{(\w+)}")

NOISE = tuple(_TABLES["noise"]["texts"])


def _filled(rng: random.Random, template: str, table: dict[str, Any]) -> str:
    """The template with each field replaced by a choice of the table's list, or word of its string, of that name."""

    def choose(match: re.Match[str]) -> str:
        choices = table[match[1]]
        return rng.choice(choices.split() if isinstance(choices, str) else choices)

    return capital(_SLOT.sub(choose, template))


def foreign(rng: random.Random, _: Lexicon) -> Iterator[str]:
    """Paragraphs of German or Spanish sentences."""
    while True:
        table = _TABLES[rng.choice(("german", "spanish"))]
        yield " ".join(_filled(rng, rng.choice(table["sentences"]), table) for _ in range(rng.randint(3, 9)))


def novel(rng: random.Random, _: Lexicon) -> Iterator[str]:
    """Paragraphs in the manner of a Victorian novel."""
    table = _TABLES["novel"]
    while True:
        makers: dict[str, Callable[[], str]] = {
            "name": lambda: rng.choice(v.FIRST_NAMES),
            "last": lambda: rng.choice(v.LAST_NAMES),
            "place": lambda: v.place(rng),
            "noun": lambda: rng.choice(v.NOUNS),
            "plural": lambda: rng.choice(v.NOUNS) + "s",
            "adj": lambda: rng.choice(v.ADJECTIVES),
            "job": lambda: rng.choice(v.JOBS),
            "month": lambda: rng.choice(v.MONTHS),
        }
        templates = (rng.choice(table["sentences"]) for _ in range(rng.randint(3, 10)))
        yield " ".join(
            capital(_SLOT.sub(lambda match, makers=makers: makers[match[1]](), template)) for template in templates
        )


def program(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    """Blocks of lines that look like C, SQL, JavaScript and Rust."""
    table = _TABLES["program"]
    while True:
        lines = []
        for _ in range(rng.randint(8, 40)):
            words = {name: lexicon.word(rng) for name in "abcd"}
            lines.append(
                "    " * rng.randint(0, 3)
                + rng.choice(table["lines"]).format(
                    **words,
                    A=words["a"].upper(),
                    B=words["b"].upper(),
                    i=rng.choice("ijkn"),
                    n=v.digits(rng, 1, 4),
                    type=rng.choice(table["types"].split()),
                    call=rng.choice(table["calls"].split()),
                )
            )
        yield "\n".join(lines)


def _access(rng: random.Random, lexicon: Lexicon) -> str:
    address = ".".join(str(rng.randrange(256)) for _ in range(4))
    stamp = f"{rng.randint(1, 28):02}/{rng.choice(v.MONTHS)[:3]}/2025:{rng.randrange(24):02}:{rng.randrange(60):02}"
    path = "/".join(lexicon.word(rng) for _ in range(rng.randint(1, 4)))
    agent = rng.choice(_TABLES["logs"]["agents"])
    return (
        f'{address} - - [{stamp}] "GET /{path} HTTP/1.1" {rng.choice((200, 304, 404))} {v.digits(rng, 2, 6)} "{agent}"'
    )


def _kernel(rng: random.Random, lexicon: Lexicon) -> str:
    text = rng.choice(_TABLES["logs"]["kernel"])
    filled = text.format(n=v.digits(rng, 1, 4), m=rng.randrange(8), a=lexicon.word(rng))
    return f"[{rng.randrange(100000):>6}.{rng.randrange(10**6):06}] {filled}"


def logs(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    """Blocks of a web server's access log or of a kernel's."""
    while True:
        line = rng.choice((_access, _kernel))
        yield "\n".join(line(rng, lexicon) for _ in range(rng.randint(10, 60)))
