"""Words, names, keys and values from which facts and generated prose are made."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.recall.tables import load

_TABLES = load("words")

ADJECTIVES = tuple(_TABLES["adjectives"].split())
NOUNS = tuple(_TABLES["nouns"].split())
FIRST_NAMES = tuple(_TABLES["first_names"].split())
LAST_NAMES = tuple(_TABLES["last_names"].split())
PLACES = tuple(_TABLES["places"].split())
COLOURS = tuple(_TABLES["colours"].split())
JOBS = tuple(_TABLES["jobs"].split())
MATERIALS = tuple(_TABLES["materials"].split())
GOODS = tuple(_TABLES["goods"].split())
LANGUAGES = tuple(_TABLES["languages"].split())
VERB_PHRASES = tuple(_TABLES["verb_phrases"])
MONTHS = tuple(_TABLES["months"].split())
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
RELATIONS = tuple(_TABLES["relations"])
HELD_OUT_RELATIONS = tuple(_TABLES["held_out_relations"])


@dataclass(frozen=True)
class Lexicon:
    """The words that keys and values may use: the lists above, and any `extra` words found in the corpus.

    Of adjectives a share of `wide` is any word, of nouns as many or a quarter. As long as no adjective of training was,
    a value of two words was known by the first of them being in the list, and cut where it was not.
    """

    extra: tuple[str, ...] = ()
    wide: float = 0.0

    def adjective(self, rng: random.Random) -> str:
        # Without `wide` nothing is drawn for it: the prompts of `longreach bench recall` are what they were before it.
        return self.word(rng) if self.wide and rng.random() < self.wide else rng.choice(ADJECTIVES)

    def noun(self, rng: random.Random) -> str:
        return self.word(rng) if rng.random() < max(0.25, self.wide) else rng.choice(NOUNS)

    def word(self, rng: random.Random) -> str:
        """A word of the corpus if there are any, else one of the lists, else an invented one."""
        if rng.random() < 0.3:
            return syllables(rng)
        return rng.choice(self.extra or NOUNS)


def syllables(rng: random.Random, least: int = 2, most: int = 3) -> str:
    """An invented lower-case word of `least` to `most` syllables."""
    end = rng.choice(("", "", "n", "r", "s", "x", "th"))
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(least, most))) + end


def person(rng: random.Random) -> str:
    """A name: first, or first and last, now and then with a title, one in five parts of it invented."""
    first = rng.choice(FIRST_NAMES) if rng.random() < 0.8 else syllables(rng).capitalize()
    last = rng.choice(LAST_NAMES) if rng.random() < 0.8 else syllables(rng).capitalize()
    title = rng.choice(("Dr. ", "Mr. ", "Mrs. ", "Captain ", "Professor ")) if rng.random() < 0.1 else ""
    return first if not title and rng.random() < 0.25 else f"{title}{first} {last}"


def place(rng: random.Random) -> str:
    """A town, four in ten invented."""
    return rng.choice(PLACES) if rng.random() < 0.6 else syllables(rng).capitalize()


def digits(rng: random.Random, least: int = 3, most: int = 8) -> str:
    """A number of `least` to `most` digits with no leading zero."""
    size = rng.randint(least, most)
    return str(rng.randrange(10 ** (size - 1), 10**size))


def shaped(rng: random.Random, shape: str) -> str:
    """`shape` with capital letters for its A, small ones for its a and digits for its 0."""
    letters, figures = "ABCDEFGHJKLMNPQRSTUVWXYZ", "0123456789"
    pick: dict[str, str] = {"A": letters, "a": letters.lower(), "0": figures}
    return "".join(rng.choice(pick[c]) if c in pick else c for c in shape)


def code(rng: random.Random) -> str:
    """An identifier such as K7-204, QX-88-ZT, 4F-A91C or 7d0c2e1f."""
    shape = rng.choice(_CODE_SHAPES)
    return f"{rng.getrandbits(32):08x}" if shape == "hex" else shaped(rng, shape)


_CODE_SHAPES = (
    *("A0-000", "AA-000", "AA-00-AA", "0A-A00A", "AAA000", "A000"),
    *("000-000", "AAAA-0000", "00-00-00", "hex", "A00.0", "aa_000"),
)


def uuid(rng: random.Random) -> str:
    """128 random bits as a UUID is written."""
    text = f"{rng.getrandbits(128):032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def date(rng: random.Random) -> str:
    """A day of a year from 1800 to 2040, written in one of four ways, one of them without the year."""
    day, month, year = rng.randint(1, 28), rng.randrange(12), rng.randint(1800, 2040)
    return rng.choice(
        (
            f"{MONTHS[month]} {day}, {year}",
            f"{day} {MONTHS[month]} {year}",
            f"{year}-{month + 1:02}-{day:02}",
            f"{MONTHS[month]} {day}",
        )
    )


def clock(rng: random.Random) -> str:
    """A time of day such as 7:05 or 18:30."""
    return f"{rng.randrange(24)}:{rng.randrange(60):02}"


def phrase(rng: random.Random, lexicon: Lexicon) -> str:
    """A few words: what to do somewhere, or words in a row."""
    if rng.random() < 0.4:
        return rng.choice(VERB_PHRASES)
    return " ".join(lexicon.word(rng) for _ in range(rng.randint(2, 6)))


def words(rng: random.Random, lexicon: Lexicon) -> str:
    """One or two words, sometimes capitalised or hyphenated."""
    text = lexicon.word(rng)
    if rng.random() < 0.3:
        text += rng.choice((" ", " ", "-", "_")) + lexicon.word(rng)
    return text.title() if rng.random() < 0.15 else text.upper() if rng.random() < 0.05 else text


def amount(rng: random.Random) -> str:
    """A number below a million, mostly with a unit or a currency."""
    whole = rng.randrange(1, 10 ** rng.randint(1, 6))
    shape = rng.choice(("{}", "${}", "{} euros", "{:,}", "{}.50", "{}.25", "{} kg", "{} meters", "{}%"))
    return shape.format(whole)


_VALUES: tuple[tuple[float, Callable[[random.Random, Lexicon], str]], ...] = (
    (0.38, lambda rng, _: digits(rng)),
    (0.05, lambda rng, _: digits(rng, 1, 12)),
    (0.12, lambda rng, _: code(rng)),
    (0.20, words),
    (0.06, lambda rng, lexicon: f"{lexicon.adjective(rng)} {lexicon.noun(rng)}"),
    (0.04, phrase),
    (0.03, lambda rng, _: person(rng)),
    (0.02, lambda rng, _: place(rng)),
    (0.03, lambda rng, _: date(rng)),
    (0.02, lambda rng, _: clock(rng)),
    (0.03, lambda rng, _: amount(rng)),
    (0.02, lambda rng, _: uuid(rng)),
)


def value(rng: random.Random, lexicon: Lexicon) -> str:
    """A value of any kind: mostly numbers, then words, codes, names, dates."""
    return rng.choices([make for _, make in _VALUES], [weight for weight, _ in _VALUES])[0](rng, lexicon)


def key(rng: random.Random, lexicon: Lexicon) -> str:
    """A noun phrase that names something, with its article where English wants one: `the silver lantern`, `Oslo`,
    `order K7-204`.
    """
    draw = rng.random()
    if draw < 0.32:
        name = f"{lexicon.adjective(rng)} {lexicon.noun(rng)}"
        return name if rng.random() < 0.25 else f"the {name}"
    if draw < 0.40:
        return f"the {lexicon.noun(rng)}"
    if draw < 0.55:
        return person(rng)
    if draw < 0.62:
        return place(rng)
    if draw < 0.72:
        return lexicon.word(rng)
    if draw < 0.80:
        return f"{lexicon.word(rng)} {lexicon.word(rng)}"
    if draw < 0.84:
        return f"{lexicon.word(rng)}-{lexicon.word(rng)}"
    if draw < 0.89:
        return f"the {lexicon.noun(rng)} {rng.choice(('of', 'in', 'near', 'from'))} {place(rng)}"
    if draw < 0.93:
        kind = rng.choice(("project", "agent", "unit", "team", "operation", "sector", "room", "user", "node"))
        return f"{kind} {rng.choice((lexicon.word(rng).capitalize(), digits(rng, 1, 4)))}"
    if draw < 0.97:
        return code(rng)
    return uuid(rng) if draw < 0.985 else f"{lexicon.word(rng)}_{lexicon.word(rng)}"
