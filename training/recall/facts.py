"""One document's facts: drawn so that each question has one right answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

from longreach.bench.recall.sampler import NOT_STATED

from training.recall import events, grammar
from training.recall import phrasings as p
from training.recall import vocabulary as v
from training.recall.items import Item, Query, Statement
from training.recall.phrasings import capital, fill
from training.recall.tables import load
from training.recall.vocabulary import Lexicon

Phrasing = Literal["mixed", "plain", "held_out"]

_TABLES = load("facts")

# Of the mixture: documents whose numbers and invented words have a few digits and syllables only, documents whose
# passages have a few words only, those whose words are the ones that stories are made of, relations of any two or three
# words, keys that the question writes in another case.
FEW_CHARACTERS = 0.35
FEW_IN_CHAINS = 0.6  # where all of the document is chains
FEW_WORDS = 0.5
STORY_WORDS = 0.5
ANY_RELATION = 0.15
OTHER_CASE = 0.3
OTHER_CASE_ASKED = 0.08  # where a model is tested
MENTIONS = tuple(_TABLES["mentions"])


def _filled(
    questions: tuple[str, ...], stems: tuple[str, ...], relation: str, key: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(fill(q, relation, key) for q in questions), tuple(fill(s, relation, key) for s in stems)


def _single(
    key: str,
    relation: str,
    value: str,
    statement: str,
    questions: tuple[str, ...],
    stems: tuple[str, ...],
    *,
    line: bool = False,
) -> Item:
    query = Query("single", *_filled(questions, stems, relation, key), value)
    return Item((Statement(statement, line),), (query,), key, relation, value)


class Drawer:
    """Draws the facts of one document.

    Half of the documents share one relation among all their facts, and some share words between keys, so that only
    the whole key tells facts apart. `phrasing` is `mixed` (what training uses: a quarter fixed templates, the rest
    from the grammar), `plain` (the fixed templates alone), or `held_out` (those that training never uses). `hard` is
    that of `Spec`.
    """

    def __init__(
        self,
        rng: random.Random,
        lexicon: Lexicon,
        phrasing: Phrasing = "mixed",
        few_characters: float = FEW_CHARACTERS,
        *,
        hard: bool = False,
    ) -> None:
        self.rng, self.lexicon, self.phrasing, self.hard = rng, lexicon, phrasing, hard
        # The words that facts are made of; those of phrasings are `lexicon`'s. A model is tested with the short lists,
        # whose words stand in the text around, too, and more often the longer it is. As long as training hardly had
        # such, passages went on from there, and words of the text were counted with those of a list.
        self.fact_lexicon = Lexicon() if phrasing == "mixed" and rng.random() < STORY_WORDS else lexicon
        self.held_out = phrasing == "held_out"
        self.shared_relation = self.new_relation() if rng.random() < 0.5 else None
        self.shared_word = self.fact_lexicon.adjective(rng) if rng.random() < 0.2 else None
        # Few digits and letters, for the same reason as passages of few words (below): a value that was found by a
        # chain of variables was gone on with from another value that begins with the same digit.
        few = phrasing == "mixed" and rng.random() < few_characters
        self.digits = rng.sample("0123456789", rng.randint(2, 4)) if few else []
        self.syllables = tuple(v.syllables(rng, 1, 1) for _ in range(rng.randint(2, 5))) if few else ()
        self.shared_value: Callable[[], str] | None = (lambda: self.number(4, 7)) if rng.random() < 0.3 else None
        # Whether all variables of the document are assigned in one wording, those of each chain in one, or each in its
        # own: as long as every chain had its own, that, and not the names, was what a trained model followed.
        self.same_wording = (
            rng.choices(("document", "chain", "statement"), (6, 2, 2))[0] if phrasing == "mixed" else "chain"
        )
        self.wording: tuple[bool, str, str] | None = None
        # Passages of few words: as long as hardly one came twice, the word before told the next one, and a trained
        # model went on from the wrong one of two places with the same word.
        few = phrasing == "mixed" and rng.random() < FEW_WORDS
        self.words = tuple(self.fact_lexicon.word(rng) for _ in range(rng.randint(4, 40))) if few else ()
        self.keys: set[str] = set()
        self.posed: set[int] = set()  # ids of the queries that were asked for
        self.relations_without_key: set[str] = set()

    def passage_word(self) -> str:
        """A word of a passage."""
        return self.rng.choice(self.words) if self.words else self.fact_lexicon.word(self.rng)

    def share_relation(self) -> None:
        """Let all facts from now on share one relation."""
        self.shared_relation = self.shared_relation or self.new_relation()

    def new_relation(self) -> str:
        """A relation such as `pass key` or `silver code`."""
        rng = self.rng
        if self.phrasing == "mixed" and rng.random() < ANY_RELATION:
            return " ".join(self.fact_lexicon.word(rng) for _ in range(rng.choice((2, 2, 3))))
        if self.held_out and rng.random() < 0.5:
            return rng.choice(v.HELD_OUT_RELATIONS)
        draw = rng.random()
        if draw < 0.6:
            return rng.choice(v.RELATIONS)
        if draw < 0.78:
            return f"{self.fact_lexicon.adjective(rng)} {rng.choice(v.RELATIONS)}"
        return (
            self.fact_lexicon.noun(rng)
            if draw < 0.89
            else f"{self.fact_lexicon.noun(rng)} {rng.choice(('code', 'number', 'key', 'name', 'word'))}"
        )

    def new_key(self, make: Callable[[random.Random, Lexicon], str]) -> str:
        """A key that is no part of another and has no other as a part."""
        for attempt in range(50):
            key = (
                make(self.rng, self.fact_lexicon)
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
            return self.new_key(lambda rng, lexicon: f"the {self.shared_word} {lexicon.noun(rng)}")
        return self.new_key(v.key)

    def _value(self) -> str:
        if self.shared_value:
            return self.shared_value()
        return self.brief_value() if self.digits and self.rng.random() < 0.5 else v.value(self.rng, self.fact_lexicon)

    def brief_value(self) -> str:
        """A number or a word: what can be one of a list."""
        if self.rng.random() < 0.7:
            return self.number(3, 7)
        if self.syllables and self.rng.random() < 0.7:
            return "".join(self.rng.choices(self.syllables, k=self.rng.randint(2, 4)))
        return self.fact_lexicon.word(self.rng)

    def number(self, least: int, most: int) -> str:
        """A number of `least` to `most` digits with no leading zero."""
        if not self.digits:
            return v.digits(self.rng, least, most)
        text = "".join(self.rng.choices(self.digits, k=self.rng.randint(max(least, 3), most)))
        return text if text[0] != "0" else self.rng.choice("123456789") + text[1:]

    def fact(self) -> Item:
        """A fresh fact of any kind."""
        draw = self.rng.random()
        if draw < 0.10:
            fact = self._keyless()
            if fact is not None:
                return fact
        if draw < 0.28:
            return self.record()
        if draw < 0.54:
            return self._event()
        return self.relation()

    def asked(self, fixed: tuple[str, ...], held_out: tuple[str, ...], make: Callable[[], str]) -> tuple[str, ...]:
        """The held-out templates or all fixed ones; in the mixture, one of those or, twice as often, a new one."""
        if self.phrasing != "mixed":
            return held_out if self.held_out else fixed
        return (self.rng.choice(fixed) if self.rng.random() < 1 / 3 else make(),)

    def told_as(self, fixed: tuple[str, ...], held_out: tuple[str, ...], make: Callable[[], str]) -> str:
        if self.held_out:
            return self.rng.choice(held_out)
        return self.rng.choice(fixed) if self.phrasing == "plain" or self.rng.random() < 0.25 else make()

    def absent(self, known: Sequence[Item]) -> Query:
        """A query that nothing stated so far answers: about a new fact, or another relation of a known key."""
        rng = self.rng
        related = [item for item in known if item.key and item.relation]
        about = self.fact()
        if (
            related
            and about.key
            and about.relation
            and about.relation not in self.relations_without_key
            and rng.random() < 0.5
        ):
            item = rng.choice(related)
            if item.relation != about.relation:
                questions = self.asked(p.QUESTIONS, p.HELD_OUT_QUESTIONS, lambda: grammar.question(rng, self.lexicon))
                return Query("absent", *_filled(questions, p.STEMS, about.relation, item.key), NOT_STATED)
        query = about.queries[0]
        return Query("absent", query.questions, query.stems, NOT_STATED)

    def relation(self, *, brief: bool = False) -> Item:
        """A fact that relates a key to a value: the pass key for the silver lantern is 48213.

        A `brief` one has the shared relation and a number or a word as its value.
        """
        rng, lexicon = self.rng, self.lexicon
        shared = self.shared_relation if brief or rng.random() < 0.9 else None
        relation = shared or self.new_relation()
        key, value = self._key(), self.brief_value() if brief else self._value()
        statement = self.told_as(p.STATEMENTS, p.HELD_OUT_STATEMENTS, lambda: grammar.statement(rng, lexicon))
        questions = self.asked(p.QUESTIONS, p.HELD_OUT_QUESTIONS, lambda: grammar.question(rng, lexicon))
        stems = self.asked(p.STEMS, p.STEMS, lambda: grammar.stem(rng, lexicon))
        told = fill(statement, relation, key, value)
        if rng.random() < (OTHER_CASE if self.phrasing == "mixed" else OTHER_CASE_ASKED):
            key = key.title() if rng.random() < 0.5 else key.lower()
        return _single(key, relation, value, told, questions, stems)

    def _keyless(self) -> Item | None:
        rng, lexicon, relation = self.rng, self.lexicon, self.new_relation()
        if relation == self.shared_relation or relation in self.relations_without_key:
            return None
        self.relations_without_key.add(relation)
        value = self._value()
        statement = self.told_as(
            p.KEYLESS_STATEMENTS, p.KEYLESS_STATEMENTS, lambda: grammar.statement(rng, lexicon, keyed=False)
        )
        questions = self.asked(
            p.KEYLESS_QUESTIONS, p.KEYLESS_QUESTIONS, lambda: grammar.question(rng, lexicon, keyed=False)
        )
        stems = self.asked(p.KEYLESS_STEMS, p.KEYLESS_STEMS, lambda: grammar.stem(rng, lexicon, keyed=False))
        return _single("", relation, value, fill(statement, relation, "", value), questions, stems)

    def record(self) -> Item:
        rng, lexicon = self.rng, self.lexicon
        key, value = self._key().removeprefix("the "), self._value()
        statement = self.told_as(p.RECORDS, p.HELD_OUT_RECORDS, lambda: grammar.record(rng, lexicon))
        questions = self.asked(
            p.RECORD_QUESTIONS, p.HELD_OUT_RECORD_QUESTIONS, lambda: grammar.record_question(rng, lexicon)
        )
        return _single(key, "", value, fill(statement, "", key, value), questions, p.RECORD_STEMS, line=True)

    def _event(self) -> Item:
        if self.held_out:
            family = self.rng.choice(p.HELD_OUT_FAMILIES)
        else:
            plain = self.phrasing == "plain" or self.rng.random() < 0.35
            family = self.rng.choice(p.FAMILIES) if plain else events.event(self.rng, self.lexicon)
        key, value = self.new_key(family.key), family.value(self.rng, self.fact_lexicon)
        statement = self.rng.choice(family.statements)
        return _single(key, "", value, fill(statement, "", key, value), family.questions, ())

    def mention(self, fact: Item) -> str:
        """A sentence that names the fact's key or relation and states nothing."""
        choices = [m for m in MENTIONS if ("{r}" in m) == (not fact.key)] if fact.key or fact.relation else []
        template = self.rng.choice(choices)
        return template.format(
            k=fact.key, K=capital(fact.key), r=fact.relation, month=self.rng.choice(v.MONTHS), name=v.person(self.rng)
        )
