"""One document's facts: drawn so that each question has one right answer."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from training import events, grammar
from training import phrasings as p
from training import vocabulary as v
from training.phrasings import capital, fill
from training.tables import load
from training.vocabulary import Lexicon

Phrasing = Literal["mixed", "plain", "held_out"]

_TABLES = load("facts")

MENTIONS = tuple(_TABLES["mentions"])


@dataclass(frozen=True)
class Fact:
    """A statement, what it says, and how it may be asked for.

    `key` is empty where the question names a relation alone. `line` facts stand on lines of their own.
    """

    key: str
    relation: str
    value: str
    statement: str
    questions: tuple[str, ...]
    stems: tuple[str, ...]
    line: bool


def _filled(
    questions: tuple[str, ...], stems: tuple[str, ...], relation: str, key: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(fill(q, relation, key) for q in questions), tuple(fill(s, relation, key) for s in stems)


class Drawer:
    """Draws the facts of one document.

    Half of the documents share one relation among all their facts, and some share words between keys, so that only
    the whole key tells facts apart. `phrasing` is `mixed` (what training uses: a quarter fixed templates, the rest
    from the grammar), `plain` (the fixed templates alone), or `held_out` (those that training never uses).
    """

    def __init__(self, rng: random.Random, lexicon: Lexicon, phrasing: Phrasing = "mixed") -> None:
        self.rng, self.lexicon, self.phrasing = rng, lexicon, phrasing
        self.held_out = phrasing == "held_out"
        self.shared_relation = self._new_relation() if rng.random() < 0.5 else None
        self.shared_word = lexicon.adjective(rng) if rng.random() < 0.2 else None
        self.shared_value: Callable[[], str] | None = (lambda: v.digits(rng, 4, 7)) if rng.random() < 0.3 else None
        self.keys: set[str] = set()
        self.relations_without_key: set[str] = set()

    def _new_relation(self) -> str:
        rng = self.rng
        if self.held_out and rng.random() < 0.5:
            return rng.choice(v.HELD_OUT_RELATIONS)
        draw = rng.random()
        if draw < 0.6:
            return rng.choice(v.RELATIONS)
        if draw < 0.78:
            return f"{self.lexicon.adjective(rng)} {rng.choice(v.RELATIONS)}"
        return (
            self.lexicon.noun(rng)
            if draw < 0.89
            else f"{self.lexicon.noun(rng)} {rng.choice(('code', 'number', 'key', 'name', 'word'))}"
        )

    def _new_key(self, make: Callable[[random.Random, Lexicon], str]) -> str:
        """A key that is no part of another and has no other as a part."""
        for attempt in range(50):
            key = (
                make(self.rng, self.lexicon)
                if attempt < 30
                else f"{v.syllables(self.rng)} {v.syllables(self.rng, 3, 4)}"
            )
            bare = f" {key.removeprefix('the ').lower()} "
            if not any(bare in other or other in bare for other in self.keys):
                self.keys.add(bare)
                return key
        raise ValueError(f"no key is left beside {len(self.keys)} others: ask for fewer facts")

    def _key(self) -> str:
        if self.shared_word and self.rng.random() < 0.5:
            return self._new_key(lambda rng, lexicon: f"the {self.shared_word} {lexicon.noun(rng)}")
        return self._new_key(v.key)

    def _value(self) -> str:
        return self.shared_value() if self.shared_value else v.value(self.rng, self.lexicon)

    def fact(self) -> Fact:
        """A fresh fact of any kind."""
        draw = self.rng.random()
        if draw < 0.10:
            fact = self._keyless()
            if fact is not None:
                return fact
        if draw < 0.28:
            return self._record()
        if draw < 0.54:
            return self._event()
        return self._relation()

    def _asked(self, fixed: tuple[str, ...], held_out: tuple[str, ...], make: Callable[[], str]) -> tuple[str, ...]:
        """The held-out templates, all fixed ones, or one of them and two new ones."""
        if self.phrasing != "mixed":
            return held_out if self.held_out else fixed
        return (self.rng.choice(fixed), *(make() for _ in range(2)))

    def _told(self, fixed: tuple[str, ...], held_out: tuple[str, ...], make: Callable[[], str]) -> str:
        if self.held_out:
            return self.rng.choice(held_out)
        return self.rng.choice(fixed) if self.phrasing == "plain" or self.rng.random() < 0.25 else make()

    def _relation(self) -> Fact:
        rng, lexicon = self.rng, self.lexicon
        relation = self.shared_relation if self.shared_relation and rng.random() < 0.9 else self._new_relation()
        key, value = self._key(), self._value()
        statement = self._told(p.STATEMENTS, p.HELD_OUT_STATEMENTS, lambda: grammar.statement(rng, lexicon))
        questions = self._asked(p.QUESTIONS, p.HELD_OUT_QUESTIONS, lambda: grammar.question(rng, lexicon))
        stems = self._asked(p.STEMS, p.STEMS, lambda: grammar.stem(rng, lexicon))
        told = fill(statement, relation, key, value)
        if rng.random() < 0.08:  # the question may be written in another case than the statement
            key = key.title() if rng.random() < 0.5 else key.lower()
        return Fact(key, relation, value, told, *_filled(questions, stems, relation, key), line=False)

    def _keyless(self) -> Fact | None:
        rng, lexicon, relation = self.rng, self.lexicon, self._new_relation()
        if relation == self.shared_relation or relation in self.relations_without_key:
            return None
        self.relations_without_key.add(relation)
        value = self._value()
        statement = self._told(
            p.KEYLESS_STATEMENTS, p.KEYLESS_STATEMENTS, lambda: grammar.statement(rng, lexicon, keyed=False)
        )
        questions = self._asked(
            p.KEYLESS_QUESTIONS, p.KEYLESS_QUESTIONS, lambda: grammar.question(rng, lexicon, keyed=False)
        )
        stems = self._asked(p.KEYLESS_STEMS, p.KEYLESS_STEMS, lambda: grammar.stem(rng, lexicon, keyed=False))
        return Fact(
            "",
            relation,
            value,
            fill(statement, relation, "", value),
            *_filled(questions, stems, relation, ""),
            line=False,
        )

    def _record(self) -> Fact:
        rng, lexicon = self.rng, self.lexicon
        key, value = self._key().removeprefix("the "), self._value()
        statement = self._told(p.RECORDS, p.HELD_OUT_RECORDS, lambda: grammar.record(rng, lexicon))
        questions = self._asked(
            p.RECORD_QUESTIONS, p.HELD_OUT_RECORD_QUESTIONS, lambda: grammar.record_question(rng, lexicon)
        )
        return Fact(
            key, "", value, fill(statement, "", key, value), *_filled(questions, p.RECORD_STEMS, "", key), line=True
        )

    def _event(self) -> Fact:
        if self.held_out:
            family = self.rng.choice(p.HELD_OUT_FAMILIES)
        else:
            plain = self.phrasing == "plain" or self.rng.random() < 0.35
            family = self.rng.choice(p.FAMILIES) if plain else events.event(self.rng, self.lexicon)
        key, value = self._new_key(family.key), family.value(self.rng, self.lexicon)
        statement = self.rng.choice(family.statements)
        return Fact(
            key, "", value, fill(statement, "", key, value), *_filled(family.questions, (), "", key), line=False
        )

    def mention(self, fact: Fact) -> str:
        """A sentence that names the fact's key or relation and states nothing."""
        choices = [m for m in MENTIONS if ("{r}" in m) == (not fact.key)] if fact.key or fact.relation else []
        template = self.rng.choice(choices)
        return template.format(
            k=fact.key, K=capital(fact.key), r=fact.relation, month=self.rng.choice(v.MONTHS), name=v.person(self.rng)
        )
