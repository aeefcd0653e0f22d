"""The suite `ruler-like`: RULER's kinds of task (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654) as completions.

A prompt ends in the beginning of a sentence, and the answer is how it goes on. So a base model can do it, and a chat
model is asked without its template. All texts are on every machine (`haystacks`).
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from longreach.bench.recall import sampler
from longreach.bench.recall.haystacks import HAYSTACKS, lines_of
from longreach.bench.recall.tokens import Count

SHORTEST = 512
_SLACK = 6  # tokens that an answer may have beyond those of the right one
_SPARE = 8  # tokens for a beginning of sequence, and for what a server may add
_CLOSE = 0.98  # of the room for a text, which is enough
_TRIES = 8
_FACTS, _PAIRS, _CHAINS, _SHOWN, _VALUES, _PASSAGES = 16, 24, 6, 3, 2, 6
_WORDS, _EXTRA = 24, 8  # words of a list, of which one comes so many times as often as each other


@dataclass(frozen=True)
class Completion:
    """A prompt as text without its beginning-of-sequence token, and what must come next.

    `length` is in tokens, of the prompt and its answer together at most; `depth` in [0, 1] is where the first statement
    stands that is asked for. `values` are what the answer must state, in any order if there are several.
    """

    task: str
    length: int
    depth: float
    haystack: str
    text: str
    values: tuple[str, ...]
    max_tokens: int

    @property
    def answer(self) -> str:
        """The right answer as text."""
        return ", ".join(self.values)

    def right(self, answer: str) -> bool:
        """Whether `answer` begins with the value, or has all of several values, none of them as a part of a word."""
        if len(self.values) == 1:
            return re.match(rf"\W*{re.escape(self.values[0])}\b", answer) is not None
        return all(re.search(rf"\b{re.escape(value)}\b", answer) for value in self.values)


@dataclass(frozen=True)
class _Task:
    """What a text states, in groups whose statements keep their order, the first of which is asked for; the ending of
    the prompt; and what must come next. `words` are the text themselves, instead of a haystack."""

    groups: Sequence[Sequence[str]]
    ending: str
    values: tuple[str, ...]
    words: tuple[str, ...] = ()


def _number(rng: random.Random) -> str:
    return str(rng.randint(10_000, 99_999))


def _single(rng: random.Random) -> _Task:
    (relation, [key]), value = sampler.relation_and_keys(rng, 1), _number(rng)
    return _Task([[f"The {relation} for {key} is {value}."]], f"The {relation} for {key} is", (value,))


def _multikey(rng: random.Random) -> _Task:
    relation, keys = sampler.relation_and_keys(rng, min(_FACTS, sampler.MOST_KEYS))
    facts = [(key, _number(rng)) for key in keys]
    groups = [[f"The {relation} for {key} is {value}."] for key, value in facts]
    return _Task(groups, f"The {relation} for {keys[0]} is", (facts[0][1],))


def _multivalue(rng: random.Random) -> _Task:
    """The values of another key, which are in the text as well, show what is wanted."""
    relation, keys = sampler.relation_and_keys(rng, 4)
    facts = [(key, tuple(_number(rng) for _ in range(_VALUES))) for key in keys]
    groups = [[f"One of the {relation}s for {key} is {value}." for value in values] for key, values in facts]
    (key, values), (shown, its_values) = facts[:2]
    ending = f"The {relation}s for {shown} are {' and '.join(its_values)}.\nThe {relation}s for {key} are"
    return _Task(groups, ending, values)


def _chain(rng: random.Random) -> _Task:
    """Each hop is written down, as small models need; some other chains are examples of how."""
    relation, keys = sampler.relation_and_keys(rng, _CHAINS)
    owners = rng.sample(sampler.NAMES.split(), _CHAINS)
    facts = [(_capital(key), owner, _number(rng)) for key, owner in zip(keys, owners, strict=True)]
    groups = [[f"{key} belongs to {owner}.", f"The {relation} of {owner} is {value}."] for key, owner, value in facts]
    key, owner, value = facts[0]
    shown = [f"{k} -> {o} -> {v}" for k, o, v in facts[1 : 1 + _SHOWN]]
    return _Task(groups, "\n".join([*shown, f"{key} ->"]), (f"{owner} -> {value}",))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _passage(rng: random.Random) -> _Task:
    def told() -> tuple[str, str]:
        name = rng.choice(sampler.NAMES.split())
        here, there = rng.sample(sampler.PLACES.split(), 2)
        adjective, noun = rng.choice(sampler.ADJECTIVES.split()), rng.choice(sampler.NOUNS.split())
        day = rng.randint(1, 28)
        return f"On day {day} of the journey, {name} carried the", f"{adjective} {noun} from {here} to {there}"

    passages: dict[str, str] = {}
    while len(passages) < _PASSAGES:
        begin, end = told()
        passages.setdefault(begin, end)
    begin, end = next(iter(passages.items()))
    return _Task([[f"{begin} {end}."] for begin, end in passages.items()], begin, (end,))


def _pairs(rng: random.Random) -> _Task:
    pairs = [[f"{rng.getrandbits(32):08x}" for _ in range(2)] for _ in range(_PAIRS)]
    return _Task([[f"{key}: {value}"] for key, value in pairs], f"{pairs[0][0]}:", (pairs[0][1],))


def _frequent(rng: random.Random) -> _Task:
    words = {"".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(_WORDS)}
    most, *others = rng.sample(sorted(words), len(words))
    ending = "The word that comes most often in the list above is the word"
    return _Task([], ending, (most,), words=(*[most] * _EXTRA, *others))


_MAKERS = {
    "single": _single,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "chain": _chain,
    "passage": _passage,
    "pairs": _pairs,
    "frequent": _frequent,
}
TASKS = tuple(_MAKERS)


def completions(
    count: Count,
    task: str,
    length: int,
    number: int,
    *,
    seed: int = 7,
    haystacks: Sequence[str] = HAYSTACKS,
) -> Iterator[Completion]:
    """`number` prompts of a task, spread evenly over depths, in one haystack after the other.

    They are a function of the arguments (and, in `docs` and `code`, of Python's version), whatever else was drawn.

    Raises:
        ValueError: what is stated does not fit into `length` tokens, or a haystack is not installed.
    """
    for i in range(number):
        rng = random.Random(f"{seed} {task} {length} {i}")
        yield _draw(count, rng, task, length, (i + 0.5) / number, haystacks[i % len(haystacks)])


def _draw(count: Count, rng: random.Random, task: str, length: int, depth: float, haystack: str) -> Completion:
    made = _MAKERS[task](rng)
    most = count(" " + ", ".join(made.values)) + _SLACK
    ending = f"\n\n{made.ending}"
    room = length - _SPARE - most
    groups = _fitting(count, made.groups, room)
    places = [rng.random() for _ in range(sum(map(len, groups)))]
    pieces = _words(made.words, rng) if made.words else lines_of(haystack, rng)
    pool: list[str] = []

    def text(pieces_used: int) -> str:
        pool.extend(islice(pieces, max(0, pieces_used - len(pool))))
        return _placed(pool[:pieces_used], groups, depth, places) + ending

    # Tokens grow with pieces, about in a line: two or three tries fill the room but for a fiftieth.
    bare = count(text(0))
    if bare > room:
        raise ValueError(f"length={length} is too short for the task {task!r}: use {SHORTEST} or more")
    fits, misses, guess = 0, None, max(1, (room - bare) // 12)
    for _ in range(_TRIES):
        used = count(text(guess))
        if used > room:
            misses = guess
        else:
            fits = guess
            if used > _CLOSE * room:
                break
        guess = round(guess * (0.99 * room - bare) / max(1, used - bare))
        if guess <= fits or (misses is not None and guess >= misses):
            guess = 2 * fits + 1 if misses is None else (fits + misses) // 2
        if guess in (fits, misses):
            break
    name = "words" if made.words else haystack
    return Completion(task, length, depth, name, text(fits), made.values, most)


def _fitting(count: Count, groups: Sequence[Sequence[str]], room: int) -> list[Sequence[str]]:
    """The first group, and of the others as many as leave a quarter of the room to the haystack."""
    kept: list[Sequence[str]] = []
    left = room - room // 4
    for group in groups:
        left -= count("\n\n" + "\n\n".join(group))
        if kept and left < 0:
            break
        kept.append(group)
    return kept


def _words(words: tuple[str, ...], rng: random.Random) -> Iterator[str]:
    while True:
        for word in rng.sample(words, len(words)):
            yield f"{word} "


def _placed(pieces: Sequence[str], groups: Sequence[Sequence[str]], depth: float, places: Sequence[float]) -> str:
    """The pieces with paragraphs of the groups' statements between them: the first at `depth` of the text, the others
    of its group behind it, and those of other groups anywhere, each group in its order."""
    at: dict[int, list[str]] = {}
    drawn = iter(places)
    for number, group in enumerate(groups):
        spots = sorted(next(drawn) for _ in group)
        if number == 0:
            spots = [depth + (1 - depth) * (0.0 if i == 0 else spot) for i, spot in enumerate(spots)]
        for spot, statement in zip(spots, group, strict=True):
            at.setdefault(_spot(pieces, spot), []).append(statement)
    parts: list[str] = []
    for i in range(len(pieces) + 1):
        if i in at:
            parts.append("\n\n" + "\n\n".join(at[i]) + "\n\n")
        if i < len(pieces):
            parts.append(pieces[i])
    return "".join(parts).strip()


def _spot(pieces: Sequence[str], share: float) -> int:
    """The number of pieces that the first `share` of the characters are."""
    wanted, seen = share * sum(map(len, pieces)), 0
    for i, piece in enumerate(pieces):
        if seen + len(piece) / 2 >= wanted:
            return i
        seen += len(piece)
    return len(pieces)
