"""Prompts that hide a few fixed sentences in a plain story and ask for what they state, in the manner of RULER
(Hsieh et al. 2024): https://arxiv.org/abs/2404.06654.

The wordings are fixed: the result says how well a long prompt is read, not how well odd wordings are understood.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

NOT_STATED = "Not stated."
SLACK = 8  # tokens that an answer may run on for before it is cut off
_FACTS, _PAIRS, _CHAINS = 12, 32, 4
_SPARE = 8  # tokens for a beginning of sequence, and for joints that take more than their parts

_RELATIONS = ("pass key", "access code", "serial number", "account number", "locker number", "secret code")
ADJECTIVES = "amber bitter brave broken crimson distant frozen gentle golden hidden lonely silver violet"
NOUNS = "anchor bridge candle castle compass falcon garden harbor kettle lantern meadow mirror orchard tower"
NAMES = "Elena Marcus Sofia Daniel Ingrid Tomas Leila Oscar Nadia Felix Clara Hugo Greta Samuel Priya Jonas"
PLACES = "Lisbon Oslo Prague Vienna Nairobi Lima Kyoto Cairo Dublin Havana Athens Toronto Sydney Geneva"
MOST_KEYS = min(len(ADJECTIVES.split()), len(NOUNS.split()))
_STORY = (
    "{name} opened the {adjective} door and looked down the road toward {place}.",
    "The {noun} had stood there for longer than anyone could remember.",
    "Nobody in {place} spoke of the {noun} any more.",
    "It was raining that evening, and the streets of {place} were empty.",
    "They walked along the river without a word until {place} came into view.",
    "The letter from {other} lay unopened beside the {noun}.",
    "{name} had not slept well and kept thinking about what {other} had said.",
    "Then, quite suddenly, the {adjective} {noun} began to move.",
    "At midnight the last train from {place} arrived, late and almost empty.",
    "What a {adjective} place {place} had become since the {noun} was taken away!",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt as text without its beginning-of-sequence token, and its only right answer; `depth` in [0, 1].
    `unordered`: the answer is a list of values whose order is free.
    """

    task: str
    length: int
    depth: float
    text: str
    answer: str
    max_tokens: int
    unordered: bool = False

    def right(self, answer: str) -> bool:
        """Whether `answer`, apart from the white space around it, is the right one."""
        if self.unordered:
            return sorted(answer.strip().split(", ")) == sorted(self.answer.split(", "))
        return answer.strip() == self.answer

    def false_alarm(self, answer: str) -> bool:
        """Whether `answer` says that the text does not state what it does."""
        return self.answer != NOT_STATED and answer.strip() == NOT_STATED


@dataclass(frozen=True)
class _Document:
    """What a document states, in groups whose statements keep their order; the first group answers the question.
    `line`: each statement has a line of its own.
    """

    groups: list[list[str]]
    question: str
    answer: str
    line: bool = False


def _number(rng: random.Random) -> str:
    return str(rng.randint(10_000, 999_999))


def relation_and_keys(rng: random.Random, keys: int) -> tuple[str, list[str]]:
    """A relation, and so many keys, `MOST_KEYS` at most, no two of which have a word in common."""
    words = zip(rng.sample(ADJECTIVES.split(), keys), rng.sample(NOUNS.split(), keys), strict=True)
    return rng.choice(_RELATIONS), [f"the {adjective} {noun}" for adjective, noun in words]


def _single(rng: random.Random) -> _Document:
    (relation, [key]), value = relation_and_keys(rng, 1), _number(rng)
    return _Document([[f"The {relation} for {key} is {value}."]], f"What is the {relation} for {key}?", value)


def _absent(rng: random.Random) -> _Document:
    relation, [key, *others] = relation_and_keys(rng, _FACTS + 1)
    groups = [[f"The {relation} for {other} is {_number(rng)}."] for other in others]
    return _Document(groups, f"What is the {relation} for {key}?", NOT_STATED)


def _multivalue(rng: random.Random) -> _Document:
    relation, [key, *others] = relation_and_keys(rng, 5)
    values = [_number(rng) for _ in range(rng.randint(2, 4))]
    asked = [f"One of the {relation}s for {key} is: {value}." for value in values]
    groups = [asked, *([f"The {relation} for {other} is {_number(rng)}."] for other in others)]
    return _Document(groups, f"What are all the {relation}s for {key}?", ", ".join(values))


def _chain(rng: random.Random) -> _Document:
    letters = [rng.sample(string.ascii_uppercase, 3 * _CHAINS) for _ in range(4)]
    names, values = ["".join(name) for name in zip(*letters, strict=True)], [_number(rng) for _ in range(_CHAINS)]
    groups = [
        [f"VAR {a} = {value}", f"VAR {b} = VAR {a}", f"VAR {c} = VAR {b}"]
        for a, b, c, value in zip(names[::3], names[1::3], names[2::3], values, strict=True)
    ]
    return _Document(groups, f"What is the value of {names[2]}?", values[0], line=True)


def _uuid(rng: random.Random) -> _Document:
    pairs = [[str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(2)] for _ in range(_PAIRS)]
    key, value = pairs[0]
    return _Document([[": ".join(pair)] for pair in pairs], f"What is the value of {key}?", value, line=True)


_MAKERS = {"single": _single, "uuid": _uuid, "multivalue": _multivalue, "chain": _chain, "absent": _absent}
TASKS = tuple(_MAKERS)


def sentences(rng: random.Random) -> Iterator[str]:
    """Endless sentences of a story, each with the white space before it."""
    while True:
        name, other = rng.sample(NAMES.split(), 2)
        for gap in ("\n\n", *[" "] * rng.randint(2, 8)):
            adjective, noun, place = (rng.choice(words.split()) for words in (ADJECTIVES, NOUNS, PLACES))
            text = rng.choice(_STORY)
            yield gap + text.format(name=name, other=other, adjective=adjective, noun=noun, place=place)


class Sampler:
    """Draws prompts whose length is counted in tokens of `tokenizer`; all randomness comes from the `rng` of a call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def tokens(self, text: str) -> int:
        """The number of tokens of a text, special tokens left out."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def draw(self, rng: random.Random, task: str, length: int, depth: float) -> Prompt:
        """A prompt of at most `length` tokens with its answer, and less by a sentence at most. The first statement that
        is asked for stands at `depth`, in [0, 1].

        Raises:
            ValueError: what is asked for does not fit into `length` tokens.
        """
        document = _MAKERS[task](rng)
        ending = f"\n\n{document.question}\nAnswer:"
        room = length - _SPARE - self.tokens(f"{ending} {document.answer}")
        mark = "\n{}\n" if document.line else " {}"
        least = length // 4  # of story: a short prompt has fewer others beside what is asked for
        groups: list[list[str]] = []
        for group in document.groups:
            told = [mark.format(statement) for statement in group]
            size = sum(map(self.tokens, told))
            if groups and room - size < least:
                break
            groups.append(told)
            room -= size
        if room < 0:
            raise ValueError(f"length={length} is too short for the task {task!r}: use 512 or more")
        story: list[str] = []
        for sentence in sentences(rng):
            room -= self.tokens(sentence)
            if room < 0:
                break
            story.append(sentence)
        text = _spliced(rng, story, groups, depth).lstrip()
        most = self.tokens(f" {document.answer}") + SLACK
        return Prompt(task, length, depth, text + ending, document.answer, most, unordered=task == "multivalue")


def _spliced(rng: random.Random, story: list[str], groups: list[list[str]], depth: float) -> str:
    """The story with the statements between its sentences, groups in their order, the first of all at `depth`."""
    before: list[list[str]] = [[] for _ in range(len(story) + 1)]
    for number, group in enumerate(groups):
        first = 0 if number else round(depth * len(story))
        places = sorted(rng.randint(first, len(story)) for _ in group)
        for place, statement in zip(places if number else [first, *places[1:]], group, strict=True):
            before[place].append(statement)
    pieces: list[str] = []
    for statements, sentence in zip(before, [*story, ""], strict=True):
        for piece in (*statements, sentence):
            pieces.append(piece.lstrip() if pieces and pieces[-1].endswith("\n") else piece)
    return "".join(pieces)
