"""Text without end of kinds that do not exist: languages and formats that are made up, used for a while, and dropped.

A model that has read ten kinds of text knows those; what it should learn is that the text around a fact may be
anything. So each block of these has a vocabulary or a format of its own.
"""

import random
from collections.abc import Callable, Iterator, Mapping

from training.recall import vocabulary as v
from training.recall.vocabulary import Lexicon

_LETTERS = "abcdefghijklmnopqrstuvwxyzàáâãäåæçèéêëìíîïñòóôõöøùúûüýßœšžčřęąłğşı"
_SIGNS = "(){}[]<>;:,.=+-*/&|^%$#@!?~_\\'\"`"


def _word_of(rng: random.Random) -> Callable[[], str]:
    """Invented words of one language: its letters, its syllables, how long its words are."""
    plain = rng.random() < 0.5
    letters = rng.sample(_LETTERS[:26], rng.randint(12, 20)) + ([] if plain else rng.sample(_LETTERS[26:], 3))
    syllables = ["".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(rng.randint(30, 90))]
    most = rng.randint(2, 4)
    return lambda: "".join(rng.choices(syllables, k=rng.randint(1, most)))


def tongues(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    """Paragraphs of sentences, each block of some paragraphs in a language of its own."""
    while True:
        word = _word_of(rng)
        size = rng.randint(80, 400)
        words = [lexicon.word(rng) if rng.random() < 0.1 else word() for _ in range(size)]
        weights = [1 / (rank + 2) for rank in range(size)]  # Zipf's law
        names = [word().capitalize() if rng.random() < 0.5 else v.person(rng) for _ in range(6)]
        nouns = rng.random() < 0.2  # some write more than names with capitals
        for _ in range(rng.randint(2, 8)):
            sentences = []
            for _ in range(rng.randint(2, 9)):
                said = rng.choices(words, weights, k=rng.randint(4, 22))
                for _ in range(rng.randint(0, 2)):
                    said[rng.randrange(len(said))] = rng.choice(names)
                if nouns:
                    said = [w.capitalize() if rng.random() < 0.25 else w for w in said]
                if rng.random() < 0.15:
                    said[rng.randrange(len(said))] = v.digits(rng, 1, 5)
                for _ in range(len(said) // 7):
                    said[rng.randrange(len(said) - 1)] += rng.choice(",,,;:")
                text = " ".join(said)
                sentences.append(text[:1].upper() + text[1:] + rng.choice("....!?"))
            yield " ".join(sentences)


def _format(rng: random.Random) -> str:
    """A line with fields {name}: words, numbers, signs, glued together or not."""
    glue = rng.choice(("", "", " ", " "))
    parts = []
    for _ in range(rng.randint(2, 12)):
        field = rng.choice(
            ("{word}", "{word}", "{word}", "{name}", "{number}", "{code}", "{fixed}", "{sign}", "{sign}")
        )
        parts.append(field if rng.random() < 0.85 else rng.choice(("{word}_{word}", "{word}.{word}", "{word}({word})")))
    joined = "".join(part + (glue if rng.random() < 0.7 else " ") for part in parts)
    return "    " * rng.choice((0, 0, 0, 1, 2)) + joined.rstrip()


def lines(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    """Blocks of lines in one to eight formats, as programs, logs and tables have them."""
    while True:
        fixed = {str(i): lexicon.word(rng) for i in range(8)}
        signs = ["".join(rng.choices(_SIGNS, k=rng.choice((1, 1, 1, 2, 3)))) for _ in range(6)]
        names = [lexicon.word(rng) for _ in range(rng.randint(4, 60))]
        makers: Mapping[str, Callable[[], str]] = {
            "{word}": lambda: lexicon.word(rng),
            "{name}": lambda names=names: rng.choice(names),
            "{number}": lambda: v.digits(rng, 1, 6),
            "{code}": lambda: v.code(rng),
        }
        formats = []
        for _ in range(rng.randint(1, 8)):
            text = _format(rng)
            for field, choices in (("{fixed}", [*fixed.values()]), ("{sign}", signs)):  # the same in all lines
                while field in text:
                    text = text.replace(field, rng.choice(choices).replace("{", "(").replace("}", ")"), 1)
            formats.append(text)
        block = []
        for _ in range(rng.randint(10, 80)):
            text = rng.choice(formats)
            for field, make in makers.items():
                while field in text:
                    text = text.replace(field, make(), 1)
            block.append(text.upper() if rng.random() < 0.02 else text)
        yield "\n".join(block)


_DETERMINERS = "the the the a his her their this that every no some another my".split()  # noqa: SIM905
_PREPOSITIONS = "of in near with under for from to by beyond at upon without after".split()  # noqa: SIM905
_VERBS = """
    was had said saw took gave kept found knew left held read bought sold heard met wrote lost broke loved feared called
    brought became carried opened closed watched followed remembered forgot wanted refused offered crossed built painted
    counted stood lay came went returned arrived spoke slept waited belonged answered
""".split()  # noqa: SIM905
_JOINTS = (
    ", and",
    ", but",
    ";",
    " while",
    " because",
    " when",
    ", so",
    " although",
    ", which",
    " until",
    " before",
    ":",
)
_OTHERS = "he she it they nobody everyone who one I we you there".split()  # noqa: SIM905


def tales(rng: random.Random, lexicon: Lexicon) -> Iterator[str]:
    """Paragraphs of English that means nothing, about the names and things that facts are about."""

    def thing() -> str:
        draw = rng.random()
        if draw < 0.12:
            return rng.choice(_OTHERS)
        if draw < 0.27:
            return v.person(rng)
        if draw < 0.36:
            return v.place(rng)
        noun = lexicon.noun(rng) + ("s" if rng.random() < 0.15 else "")
        adjective = lexicon.adjective(rng) + " " if rng.random() < 0.4 else ""
        phrase = f"{rng.choice(_DETERMINERS)} {adjective}{noun}"
        return f"{phrase} {rng.choice(_PREPOSITIONS)} {thing()}" if rng.random() < 0.25 else phrase

    def clause() -> str:
        text = f"{thing()} {rng.choice(_VERBS)}"
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            text += f" {rng.choice(_PREPOSITIONS) + ' ' if rng.random() < 0.4 else ''}{thing()}"
        if rng.random() < 0.1:
            joint = rng.choice(("in", "on", "for", "of", "at"))
            text += f" {joint} {rng.choice((v.digits(rng, 1, 5), v.date(rng), v.clock(rng)))}"
        return text

    while True:
        sentences = []
        for _ in range(rng.randint(2, 10)):
            text = clause()
            for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
                text += f"{rng.choice(_JOINTS)} {clause()}"
            text = text[:1].upper() + text[1:] + rng.choice("......!?")
            sentences.append(f'"{text}"' if rng.random() < 0.08 else text)
        yield " ".join(sentences)


INVENTED: Mapping[str, Callable[[random.Random, Lexicon], Iterator[str]]] = {
    "tongues": tongues,
    "lines": lines,
    "tales": tales,
}
