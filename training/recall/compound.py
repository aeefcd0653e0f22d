"""Items that take more than one statement, or more than a look-up: repeated keys, chains, counts, lists, passages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from training.recall import grammar
from training.recall import phrasings as p
from training.recall import vocabulary as v
from training.recall.facts import Drawer
from training.recall.items import Item, Query, Statement
from training.recall.phrasings import fill
from training.recall.tables import load

_TABLES = load("compound")

MARKS = ("**{}**", "<{}>", "#{}", "[{}]", "__{}__", "@{}")
NEW = 0.7  # of the phrasings of training are by the grammar, the others from the tables
LABELS = ("A0", "AA0", "0A", "A-00", "aa00")


def _pick(drawer: Drawer, table: str, name: str) -> tuple[str, ...]:
    """The phrases of a table: the held-out ones if the drawer wants those."""
    phrases: dict[str, Any] = _TABLES[table]
    return tuple(phrases[f"held_out_{name}" if drawer.held_out else name])


def _told(drawer: Drawer, table: str, name: str, rule: str) -> str:
    """A phrase of a table; in the training mixture mostly one by a rule of the grammar."""
    if drawer.phrasing == "mixed" and drawer.rng.random() < NEW:
        return grammar.compound_statement(drawer.rng, rule, drawer.lexicon, hard=drawer.hard)
    return drawer.rng.choice(_pick(drawer, table, name))


def _asked(drawer: Drawer, table: str, name: str, rule: str) -> tuple[str, ...]:
    """The questions of a table; in the training mixture one, mostly by a rule of the grammar, else one of the table
    with words before and after it.
    """
    questions = _pick(drawer, table, name)
    if drawer.phrasing != "mixed":
        return questions
    if drawer.rng.random() < NEW:
        return (grammar.compound_question(drawer.rng, rule, drawer.lexicon, hard=drawer.hard),)
    return (grammar.dressed(drawer.rng, drawer.rng.choice(questions), drawer.lexicon),)


def repeated(drawer: Drawer, times: int) -> Item:
    """One key with `times` different values: which are they all, which came first, which last?"""
    rng = drawer.rng
    relation = drawer.shared_relation or drawer.new_relation()
    key = drawer.new_key(v.key)
    values: list[str] = []
    while len(values) < times:
        value = drawer.brief_value()
        if value not in values:
            values.append(value)

    def template() -> str:
        return grammar.sentence(_told(drawer, "repeated", "statements", "repeated"))

    alike = template() if rng.random() < (0.35 if drawer.hard else 0.5) else None
    statements = tuple(Statement(fill(alike or template(), relation, key, value)) for value in values)

    def asked(name: str) -> tuple[str, ...]:
        questions = _asked(drawer, "repeated", name, f"{name}_question")
        return tuple(fill(grammar.sentence(q), relation, key) for q in questions)

    return Item(
        statements,
        (
            Query("multivalue", asked("all"), (), ", ".join(values), listed=True, unordered=True),
            Query("first", asked("first"), (), values[0]),
            Query("last", asked("last"), (), values[-1]),
        ),
    )


def can_join(item: Item) -> bool:
    """Whether the item's value can be one of a list in an answer."""
    return bool(item.key and item.relation and item.value.isalnum() and len(item.value) < 16)


def together(drawer: Drawer, items: Sequence[Item]) -> Query:
    """One question for the values of several facts with the same relation, answered in the order asked."""
    names = [item.key for item in items]
    listed = ", ".join(names[:-1]) + drawer.rng.choice((" and ", ", ", " and ")) + names[-1]
    questions = _asked(drawer, "together", "questions", "together")
    relation = items[0].relation
    asked = tuple(p.capital(q.replace("{r}", relation).replace("{list}", listed)) for q in questions)
    return Query("multiquery", asked, (), ", ".join(item.value for item in items), listed=True)


def _variable(rng: random.Random, lexicon: v.Lexicon) -> str:
    draw = rng.random()
    if draw < 0.3:
        return rng.choice("abcdefghijklmnopqrstuvwxyz") + rng.choice(("", "", v.digits(rng, 1, 2)))
    if draw < 0.6:
        return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(3, 5)))
    return lexicon.word(rng) if draw < 0.8 else f"{lexicon.word(rng)}_{rng.choice('abcxyz')}"


def _assignment(drawer: Drawer) -> tuple[bool, str, str]:
    """Whether an assignment has a line of its own; how a variable {k} is given a value {v}, and the value of another
    variable {o}.
    """
    rng = drawer.rng
    line = rng.random() < 0.5
    if drawer.phrasing == "mixed" and rng.random() < NEW:
        told = grammar.compound_statement(rng, "assignment", drawer.lexicon)
        other = grammar.reference(rng, drawer.lexicon)
        return line, told.replace("{x}", "{v}"), told.replace("{x}", other)
    told, link = rng.choice(tuple(zip(_pick(drawer, "chain", "values"), _pick(drawer, "chain", "links"), strict=True)))
    return line, told, link


def chain(drawer: Drawer, hops: int) -> Item:
    """A value and `hops` variables after the first, each defined by the one before it."""
    rng = drawer.rng
    value = drawer.number(2, 6) if rng.random() < 0.8 else v.code(rng)
    names = [drawer.new_key(_variable) for _ in range(hops + 1)]
    wording = drawer.wording or _assignment(drawer)
    if drawer.same_wording == "document":
        drawer.wording = wording
    line, told, _ = wording
    statements = [Statement(told.replace("{k}", names[0]).replace("{v}", value), line)]
    for other, name in itertools.pairwise(names):
        line, _, link = _assignment(drawer) if drawer.same_wording == "statement" else wording
        statements.append(Statement(link.replace("{k}", name).replace("{o}", other), line))

    def query(name: str, task: str) -> Query:
        questions = _asked(drawer, "chain", "questions", "chain_question")
        return Query(task, tuple(q.replace("{k}", name).replace("{K}", name) for q in questions), (f"{name} =",), value)

    return Item(
        tuple(statements),
        # The last variable first: it is the one that evaluation asks for.
        tuple(query(names[i], "chain" if i else "single") for i in range(hops, -1, -1)),
    )


def pair(drawer: Drawer, template: str) -> Item:
    """A UUID that stands for another, on a line of its own in the manner of `template`."""
    rng = drawer.rng
    key, value = drawer.new_key(lambda rng, _: v.uuid(rng)), v.uuid(rng)
    questions = drawer.asked(
        p.RECORD_QUESTIONS, p.HELD_OUT_RECORD_QUESTIONS, lambda: grammar.record_question(rng, drawer.lexicon)
    )
    query = Query("uuid", tuple(fill(q, "", key) for q in questions), (), value)
    return Item((Statement(fill(template, "", key, value), line=True),), (query,))


def pair_template(drawer: Drawer) -> str:
    """How the pairs of one document are written."""
    return drawer.told_as(p.RECORDS, p.HELD_OUT_RECORDS, lambda: grammar.record(drawer.rng, drawer.lexicon))


def counted(drawer: Drawer, times: int) -> Item:
    """A marked word that occurs `times` times: how often?"""
    rng = drawer.rng
    word = drawer.new_key(lambda rng, lexicon: lexicon.word(rng))
    marked = rng.choice(MARKS).format(word)
    questions = tuple(q.replace("{m}", marked) for q in _asked(drawer, "counted", "questions", "count_question"))
    told = [_told(drawer, "counted", "statements", "marked") for _ in range(times)]
    return Item(
        tuple(Statement(text.replace("{m}", marked)) for text in told),
        (Query("count", questions, (), str(times)),),
    )


def frequent(drawer: Drawer, size: int) -> Item:
    """A list of `size` words, one of which occurs in 25 to 50 percent of the places and no other in more than half as
    many.
    """
    rng = drawer.rng
    top = max(3, round(size * rng.uniform(0.25, 0.5)))
    words = [top_word := drawer.fact_lexicon.word(rng)] * top
    while len(words) < size:
        word = drawer.fact_lexicon.word(rng)
        if word != top_word and word not in words:
            words += [word] * min(rng.randint(1, max(1, top // 2)), size - len(words))
    rng.shuffle(words)
    listed = rng.choice((" ", ", ", "\n")).join(words)
    text = _told(drawer, "frequent", "lists", "word_list").replace("{t}", listed)
    return Item(
        (Statement(text, line=True),),
        (Query("frequent", _asked(drawer, "frequent", "questions", "frequent_question"), (), top_word),),
    )


def passage(drawer: Drawer, words: int) -> Item:
    """A labelled passage of `words` words, to be copied."""

    def label(rng: random.Random, lexicon: v.Lexicon) -> str:
        return lexicon.word(rng).capitalize() if rng.random() < 0.3 else v.shaped(rng, rng.choice(LABELS))

    name = drawer.new_key(label)
    text = p.capital(" ".join(drawer.passage_word() for _ in range(words))) + "."
    template = _told(drawer, "passage", "passages", "labelled")
    questions = tuple(q.replace("{l}", name) for q in _asked(drawer, "passage", "questions", "copy_question"))
    return Item(
        (Statement(template.replace("{l}", name).replace("{t}", text), line=True),),
        (Query("copy", questions, (), text),),
    )
