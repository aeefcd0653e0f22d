"""Text that is not prose: logs, tables, configuration, listings, made-up programs, text in other scripts."""

import json
import random
from collections.abc import Callable, Iterator

from training.recall import vocabulary as v
from training.recall.phrasings import STATEMENTS, fill
from training.recall.vocabulary import Lexicon


def _log(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    service = [lexicon.word(rng) for _ in range(4)]
    shape = rng.randrange(3)
    while True:
        level, who = rng.choice(("INFO", "DEBUG", "WARN", "ERROR")), rng.choice(service)
        stamp = f"2024-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T{v.clock(rng).zfill(5)}:{rng.randrange(60):02}"
        what = rng.choice(
            (
                "request {} finished in {} ms",
                "connected to {} after {} tries",
                "cache miss for {} ({})",
                "retry {} of {}",
                "user {} read {} bytes",
            )
        )
        text = what.format(lexicon.word(rng), v.digits(rng, 1, 5))
        yield (
            f"{stamp} {level} [{who}] {text}",
            f"{level}:{who}:{text}",
            f"[{stamp}] {who}[{v.digits(rng, 2, 5)}]: {text}",
        )[shape]


def _pairs(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    line = rng.choice(
        ("{} = {}", "{}: {}", "{}={}", "{},{}", '"{}": "{}",', "| {} | {} |", "- {}: {}", "{}\t{}", "export {}={}")
    )
    name: Callable[[], str] = rng.choice(
        (lambda: v.key(rng, lexicon), lambda: v.uuid(rng), lambda: v.code(rng), lambda: lexicon.word(rng))
    )
    while True:
        yield line.format(name(), v.value(rng, lexicon))


def _table(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    columns = [rng.choice(v.RELATIONS) for _ in range(rng.randint(2, 6))]
    makers = [
        rng.choice(
            (
                lambda: v.digits(rng, 1, 6),
                lambda: v.person(rng),
                lambda: v.place(rng),
                lambda: lexicon.word(rng),
                lambda: v.amount(rng),
            )
        )
        for _ in columns
    ]
    markdown = rng.random() < 0.6
    yield "| " + " | ".join(columns) + " |" if markdown else ",".join(columns)
    if markdown:
        yield "|" + "---|" * len(columns)
    while True:
        row = [make() for make in makers]
        yield "| " + " | ".join(row) + " |" if markdown else ",".join(row)


def _objects(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    fields = [lexicon.word(rng) for _ in range(rng.randint(2, 5))]
    indent = rng.choice((None, 2))
    while True:
        yield (
            json.dumps(
                {
                    name: rng.choice((v.digits(rng), lexicon.word(rng), rng.randrange(10000), rng.random() < 0.5))
                    for name in fields
                },
                indent=indent,
            )
            + ","
        )


def _markdown(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    while True:
        words = " ".join(lexicon.word(rng) for _ in range(rng.randint(2, 12)))
        yield rng.choice(
            ("# {}", "## {}", "- {}", "* {}", "1. {}", "> {}", "**{}**", "`{}`", "[{}](#)", "{}.", "{}", "")
        ).format(words)


def _scripts(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    """Invented text in other alphabets: any UTF-8 may surround a fact."""
    first, last = rng.choice(
        (
            (0x410, 0x44F),
            (0x3B1, 0x3C9),
            (0x4E00, 0x4FFF),
            (0x5D0, 0x5EA),
            (0x627, 0x64A),
            (0x3041, 0x3096),
            (0xC0, 0x17F),
            (0x1F300, 0x1F5FF),
        )
    )
    spaced = first < 0x3000
    while True:
        size = rng.randint(4, 14)
        words = ["".join(chr(rng.randint(first, last)) for _ in range(rng.randint(2, 9))) for _ in range(size)]
        yield (" " if spaced else "").join(words) + rng.choice((".", "。", "!", "?", ","))


def _statements(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    """Lines that all look like the fact to be found, about other things."""
    relation, template = rng.choice(v.RELATIONS), rng.choice(STATEMENTS)
    make: Callable[[], str] = rng.choice(
        (lambda: v.value(rng, lexicon), lambda: v.digits(rng, 4, 7), lambda: v.uuid(rng))
    )
    per_line = rng.choice((1, 1, 4))
    while True:
        yield " ".join(fill(template, relation, v.key(rng, lexicon), make()) for _ in range(per_line))


KINDS = (_log, _pairs, _pairs, _table, _objects, _markdown, _statements)


def blocks(
    rng: random.Random, lexicon: Lexicon, kinds: tuple[Callable[[random.Random, Lexicon], Iterator[str]], ...] = KINDS
) -> Iterator[str]:
    """Endless blocks of 20 to 200 lines, each block of one kind and one manner."""
    while True:
        lines = rng.choice(kinds)(rng, lexicon)
        yield "\n".join(line for line, _ in zip(lines, range(rng.randint(20, 200)), strict=False))


def scripts(rng: random.Random) -> Iterator[str]:
    """Endless blocks of invented text in other alphabets."""
    return blocks(rng, Lexicon(), (_scripts,))
