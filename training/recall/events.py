"""Small events told in a sentence, and the questions they answer: who did what, where, when, how many.

The kinds of event are data, in `tables/events.toml`. Each draw fixes its verb, its circumstances and so on, and makes
a family of phrasings that did not exist before.
"""

import random
from collections.abc import Callable

from training.recall import vocabulary as v
from training.recall.grammar import Grammar, rough, sentence
from training.recall.phrasings import Family
from training.recall.tables import load
from training.recall.vocabulary import Lexicon

_TABLES = load("events")
_FIXED = ("base", "past", "participle", "go", "went", "plural")
_RULES = Grammar(_TABLES["rules"], _FIXED)
_KINDS = _TABLES["events"]
_WEIGHTS = [kind["weight"] for kind in _KINDS]


def _regular(base: str) -> tuple[str, ...]:
    past = base + ("d" if base.endswith("e") else "ed")
    return base, past, past


# This share of the verbs is any word, bent like a verb: a value has to be told by its place, beside a verb that was
# never read before, too.
_ANY_WORD = 0.3
_VERBS = (
    *(tuple(verb.split("/")) for verb in _TABLES["verbs"].split()),
    *(_regular(base) for base in _TABLES["regular_verbs"].split()),
)
_GOING = tuple(tuple(verb.split("/")) for verb in _TABLES["going_verbs"].split())


def _thing(rng: random.Random, lexicon: Lexicon) -> str:
    return f"the {lexicon.adjective(rng)} {lexicon.noun(rng)}"


def _actor(rng: random.Random, lexicon: Lexicon) -> str:
    draw = rng.random()
    if draw < 0.75:
        return v.person(rng)
    return f"the {rng.choice(v.JOBS)} from {v.place(rng)}" if draw < 0.88 else _thing(rng, lexicon)


def _place(rng: random.Random, lexicon: Lexicon) -> str:
    return v.place(rng) if rng.random() < 0.8 else f"the {lexicon.noun(rng)}"


def _object(rng: random.Random, lexicon: Lexicon) -> str:
    draw = rng.random()
    if draw < 0.3:
        return lexicon.noun(rng)
    if draw < 0.75:
        return f"{lexicon.adjective(rng)} {lexicon.noun(rng)}"
    return f"{lexicon.noun(rng)} {lexicon.noun(rng)}" if draw < 0.95 else lexicon.word(rng)


_MAKERS: dict[str, Callable[[random.Random, Lexicon], str]] = {
    "actor": _actor,
    "thing": _thing,
    "place": _place,
    "object": _object,
    "person": lambda rng, _: v.person(rng),
    "count": lambda rng, _: v.digits(rng, 1, 5),
    "time": lambda rng, _: v.date(rng) if rng.random() < 0.6 else v.clock(rng),
}


def event(rng: random.Random, lexicon: Lexicon) -> Family:
    """A kind of event with its words chosen: one statement, and the questions for one of its parts."""
    kind = rng.choices(_KINDS, _WEIGHTS)[0]
    base, past, participle = _regular(lexicon.word(rng)) if rng.random() < _ANY_WORD else rng.choice(_VERBS)
    go, went = rng.choice(_GOING)
    plural = f"{lexicon.noun(rng)}s"
    words = {"base": base, "past": past, "participle": participle, "go": go, "went": went, "plural": plural}
    anew = ("closer", "kind")  # all else is the same in the statement and in its questions
    statement = _RULES.expand(rng, rng.choice(kind["statements"]), lexicon, words, anew)
    questions = [_RULES.expand(rng, rng.choice(kind["questions"]), lexicon, words, anew) for _ in range(4)]
    return Family(
        (rough(rng, sentence(statement), lexicon, 0.15),),
        tuple(rough(rng, sentence(question), lexicon, 0.1) for question in questions),
        _MAKERS[kind["key"]],
        _MAKERS[kind["value"]],
    )
