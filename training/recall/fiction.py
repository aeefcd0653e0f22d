"""Prose from a grammar: small stories.

It has the look of ordinary text (names, places, talk, long and short sentences) and says nothing of relevance to any
question.
"""

import random
import re
from collections.abc import Callable, Iterator

from training.recall import vocabulary as v
from training.recall.tables import load

_TABLES = load("fiction")

SCENES = tuple(_TABLES["scenes"])
REMARKS = tuple(_TABLES["remarks"])
_CHOICES: dict[str, tuple[str, ...]] = {
    "weather": ("raining", "bitterly cold", "warm and still", "foggy", "snowing a little", "too hot to think"),
    "weather_noun": ("the rain", "the wind", "a thunderstorm", "the first snow", "the fog", "the heat of the day"),
    "daytime": ("morning", "evening", "afternoon", "night", "winter", "summer", "dawn"),
    "moved": ("moved", "walked", "drifted", "crept", "turned", "wandered", "ran"),
    "slowly": ("slowly", "quietly", "without haste", "at last", "as if asleep", "once more", "suddenly", "carefully"),
    "few": ("a few", "three", "seven", "a dozen", "twenty", "a hundred", "too many", "two or three"),
    "matter": (
        "wet wool",
        "tar",
        "warm bread",
        "cold ashes",
        "lavender",
        "ink",
        "salt",
        "old leather",
        "boiled cabbage",
        "honey",
    ),
    "relative": ("mother", "uncle", "grandfather", "sister", "aunt", "brother", "godmother", "cousin"),
    "act": ("sing", "move", "tremble", "burn", "sink", "open", "turn", "fade", "ring", "grow", "fall apart"),
    "acting": ("singing", "ringing", "burning", "falling", "howling", "turning", "creaking", "playing"),
    "hour": ("seven", "midnight", "noon", "half past four", "daybreak", "a quarter to nine"),
    "doing": (
        "closing the book",
        "without looking up",
        "and shrugged",
        "almost in a whisper",
        "reaching for the salt",
        "half asleep",
        "with a smile",
    ),
    "place_in": (
        "kitchen",
        "valley",
        "harbor",
        "old town",
        "garden",
        "attic",
        "cellar",
        "square",
        "inn",
        "garrison",
        "schoolyard",
    ),
}
_SLOT = re.compile(r"{(\w+)}")


def _cast(rng: random.Random) -> dict[str, Callable[[], str]]:
    """What each slot stands for in one paragraph: the people and places stay, the rest changes."""
    name, name2, home, abroad = v.person(rng), v.person(rng), v.place(rng), v.place(rng)
    she, her = rng.choice((("she", "her"), ("he", "his"), ("they", "their")))

    def noun() -> str:
        return v.syllables(rng) if rng.random() < 0.02 else rng.choice(v.NOUNS)

    return {
        "name": lambda: name,
        "name2": lambda: name2,
        "place": lambda: home,
        "place2": lambda: abroad,
        "she": she.capitalize,
        "she_low": lambda: she,
        "her": lambda: her,
        "her_cap": her.capitalize,
        "adj": lambda: rng.choice(v.ADJECTIVES),
        "adj2": lambda: rng.choice(v.ADJECTIVES),
        "noun": noun,
        "noun2": noun,
        "plural": lambda: rng.choice(v.NOUNS) + "s",
        "job": lambda: rng.choice(v.JOBS),
        "month": lambda: rng.choice(v.MONTHS),
        "remark": lambda: rng.choice(REMARKS),
        **{slot: (lambda options=options: rng.choice(options)) for slot, options in _CHOICES.items()},
    }


def _expand(template: str, cast: dict[str, Callable[[], str]]) -> str:
    while "{" in template:
        template = _SLOT.sub(lambda m: cast[m[1]](), template)
    return template[0].upper() + template[1:]


def paragraphs(rng: random.Random, scenes: tuple[str, ...] = SCENES) -> Iterator[str]:
    """Endless paragraphs of two to nine sentences; now and then a chapter heading."""
    chapter = 0
    while True:
        if rng.random() < 0.03:
            chapter += 1
            yield rng.choice((f"Chapter {chapter}", f"CHAPTER {chapter}", "* * *", f"## {v.place(rng)}"))
        cast = _cast(rng)
        yield " ".join(_expand(rng.choice(scenes), cast) for _ in range(rng.randint(2, 9)))


NOISE = tuple(_TABLES["noise"])
