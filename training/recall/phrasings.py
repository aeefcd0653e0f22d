"""How facts are stated and asked for: training phrasings, and others kept for evaluation.

Fields of a template: {r} the relation, {k} the key, {K} the key with a capital, {ks} its possessive, {v} the value.
Any statement of a family goes with any question of it. Held-out templates, relations and families never occur in
training.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.recall import vocabulary as v
from training.recall.tables import load
from training.recall.vocabulary import Lexicon

_TABLES = load("phrasings")

STATEMENTS = tuple(_TABLES["statements"])
HELD_OUT_STATEMENTS = tuple(_TABLES["held_out_statements"])
QUESTIONS = tuple(_TABLES["questions"])
HELD_OUT_QUESTIONS = tuple(_TABLES["held_out_questions"])
STEMS = tuple(_TABLES["stems"])
KEYLESS_STATEMENTS = tuple(_TABLES["keyless_statements"])
KEYLESS_QUESTIONS = tuple(_TABLES["keyless_questions"])
KEYLESS_STEMS = tuple(_TABLES["keyless_stems"])

# Lines of files rather than sentences: the key stands as it is, and is asked for by its value.
RECORDS = tuple(_TABLES["records"])
HELD_OUT_RECORDS = tuple(_TABLES["held_out_records"])
RECORD_QUESTIONS = tuple(_TABLES["record_questions"])
HELD_OUT_RECORD_QUESTIONS = tuple(_TABLES["held_out_record_questions"])
RECORD_STEMS = tuple(_TABLES["record_stems"])


@dataclass(frozen=True)
class Family:
    """One kind of event in a story: ways to tell it and to ask for it; what its key and value are."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    key: Callable[[random.Random, Lexicon], str]
    value: Callable[[random.Random, Lexicon], str]


def _person(rng: random.Random, _: Lexicon) -> str:
    return v.person(rng)


def _place(rng: random.Random, _: Lexicon) -> str:
    return v.place(rng)


def _thing(rng: random.Random, lexicon: Lexicon) -> str:
    return f"the {lexicon.adjective(rng)} {lexicon.noun(rng)}"


def _of(choices: tuple[str, ...]) -> Callable[[random.Random, Lexicon], str]:
    def pick(rng: random.Random, lexicon: Lexicon) -> str:
        return rng.choice(choices) if rng.random() < 0.8 else lexicon.word(rng)

    return pick


def _number(least: int, most: int) -> Callable[[random.Random, Lexicon], str]:
    return lambda rng, _: v.digits(rng, least, most)


def _date(rng: random.Random, _: Lexicon) -> str:
    return v.date(rng)


def _clock(rng: random.Random, _: Lexicon) -> str:
    return v.clock(rng)


def _noun(rng: random.Random, lexicon: Lexicon) -> str:
    return f"{lexicon.adjective(rng)} {lexicon.noun(rng)}" if rng.random() < 0.4 else lexicon.noun(rng)


FAMILIES = (
    Family(
        ("{K} lives in {v}.", "{K} has lived in {v} for years.", "{K} moved to {v} long ago."),
        ("Where does {k} live?", "In which place does {k} live?", "Where is {ks} home?"),
        _person,
        _place,
    ),
    Family(("{K} was born in {v}.",), ("Where was {k} born?", "What is {ks} place of birth?"), _person, _place),
    Family(
        ("{K} works as a {v}.", "{K} earns a living as a {v}.", "{K} is a {v} by trade."),
        ("What does {k} work as?", "What is {ks} job?", "What does {k} do for a living?"),
        _person,
        _of(v.JOBS),
    ),
    Family(
        ("{K} bought a {v} at the market.", "{K} went out and bought a {v}."),
        ("What did {k} buy?", "What did {k} buy at the market?"),
        _person,
        _of(v.GOODS),
    ),
    Family(
        ("{K} is {v} years old.", "{K} turned {v} last week."),
        ("How old is {k}?", "What is {ks} age?"),
        _person,
        _number(1, 3),
    ),
    Family(
        ("{K} was painted {v}.", "{K} had been painted {v} all over."),
        ("What color is {k}?", "What colour was {k} painted?", "In which color was {k} painted?"),
        _thing,
        _of(v.COLOURS),
    ),
    Family(
        ("The best thing to do in {k} is to {v}.", "The best thing to do in {k} is {v}."),
        ("What is the best thing to do in {k}?", "What should one do in {k}?"),
        _place,
        v.phrase,
    ),
    Family(
        ("The meeting with {k} starts at {v}.", "{K} will expect you at {v}."),
        ("When does the meeting with {k} start?", "At what time does {k} expect me?"),
        _person,
        _clock,
    ),
    Family(
        ("{K} arrived on {v}.", "{K} came home on {v}."),
        ("When did {k} arrive?", "On which day did {k} arrive?"),
        _person,
        _date,
    ),
    Family(
        ("{K} hid the key under the {v}.", "{K} hid the letter behind the {v}."),
        ("Where did {k} hide it?", "What did {k} choose as a hiding place?"),
        _person,
        _noun,
    ),
    Family(
        ("{K} speaks {v}.", "{K} speaks fluent {v}."),
        ("Which language does {k} speak?", "What language does {k} speak?"),
        _person,
        _of(v.LANGUAGES),
    ),
    Family(
        ("{K} weighs {v} kilograms.", "{K} weighs {v} pounds."),
        ("How much does {k} weigh?", "What does {k} weigh?"),
        _thing,
        _number(1, 5),
    ),
    Family(
        ("{K} costs {v} dollars.", "{K} was sold for {v} dollars."),
        ("How much does {k} cost?", "For how much was {k} sold?", "What is the price of {k}?"),
        _thing,
        _number(1, 6),
    ),
    Family(("The capital of {k} is {v}.",), ("What is the capital of {k}?",), _place, _place),
    Family(
        ("{K} scored {v} points.", "{K} finished with {v} points."),
        ("How many points did {k} score?", "What was {ks} score?"),
        _person,
        _number(1, 4),
    ),
    Family(
        ("{K} sent a letter to {v}.", "{K} wrote to {v} every Sunday."),
        ("To whom did {k} write?", "Who got a letter from {k}?"),
        _person,
        _person,
    ),
    Family(
        ("{Ks} favorite color is {v}.",),
        ("What is {ks} favorite color?", "Which color does {k} like best?"),
        _person,
        _of(v.COLOURS),
    ),
    Family(
        ("{K} was founded in {v}.", "{K} was built in {v}."),
        ("When was {k} founded?", "In which year was {k} built?"),
        _thing,
        lambda rng, _: str(rng.randint(1000, 2030)),
    ),
    Family(
        ("{K} is made of {v}.", "{K} was made of {v}."),
        ("What is {k} made of?", "Which material is {k} made of?"),
        _thing,
        _of(v.MATERIALS),
    ),
    Family(
        ("{K} was stolen by {v}.", "{K} was built by {v}.", "{K} belongs to {v}."),
        ("Who is named with {k}?", "Whose name goes with {k}?"),
        _thing,
        _person,
    ),
    Family(
        ("{K} keeps a {v} as a pet.", "{K} has a pet {v}."),
        ("What pet does {k} have?", "Which animal does {k} keep?"),
        _person,
        _noun,
    ),
    Family(
        ("{K} carried a {v} in one hand.", "{K} never left the house without a {v}."),
        ("What did {k} carry?", "What did {k} always take along?"),
        _person,
        _noun,
    ),
    Family(
        ("{K} opens at {v}.", "{K} opens its doors at {v}."),
        ("When does {k} open?", "At what time does {k} open?"),
        _thing,
        _clock,
    ),
    Family(("{K} counted {v} sheep.", "{K} counted {v} birds."), ("How many did {k} count?",), _person, _number(1, 5)),
)
HELD_OUT_FAMILIES = (
    Family(
        ("{K} plays the {v} in the town band.",),
        ("Which instrument does {k} play?",),
        _person,
        _of(("trumpet", "tuba", "cello", "oboe", "banjo", "harp")),
    ),
    Family(
        ("{K} ordered {v} for dinner.",),
        ("What did {k} order for dinner?",),
        _person,
        _of(("lentil soup", "roast duck", "dumplings", "mushroom pie", "trout")),
    ),
    Family(("{K} will travel to {v} next spring.",), ("Where will {k} travel next spring?",), _person, _place),
    Family(("{K} is exactly {v} steps long.",), ("How many steps long is {k}?",), _thing, _number(2, 5)),
)
INSTRUCTIONS = tuple(_TABLES["instructions"])
HELD_OUT_INSTRUCTIONS = tuple(_TABLES["held_out_instructions"])
CLOSING = tuple(_TABLES["closing"])
HELD_OUT_CLOSING = tuple(_TABLES["held_out_closing"])


def capital(text: str) -> str:
    """`text` with its first letter in upper case, the rest as it is."""
    return text[:1].upper() + text[1:]


def fill(template: str, relation: str, key: str, value: str = "") -> str:
    """A template of this file with its fields filled in."""
    possessive = key + ("'" if key.endswith("s") else "'s")
    return template.format(r=relation, k=key, K=capital(key), ks=possessive, Ks=capital(possessive), v=value)
