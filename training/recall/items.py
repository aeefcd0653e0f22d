"""What a document states, and what may be asked about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Statement:
    """A piece of text that goes into the document in one place; `line`: on a line of its own."""

    text: str
    line: bool = False


@dataclass(frozen=True, eq=False)
class Query:
    """One thing to ask: the ways to ask it (`stems` begin the answer's sentence), and the only right answer.

    `listed`: the answer is a list of values with commas between them; `unordered`: and their order is free.
    """

    task: str
    questions: tuple[str, ...]
    stems: tuple[str, ...]
    answer: str
    listed: bool = False
    unordered: bool = False


@dataclass(frozen=True, eq=False)
class Item:
    """Statements, in the order in which they must stand, and the queries that they answer together.

    `key`, `relation` and `value` are those of a single fact, and empty where an item has none.
    """

    statements: tuple[Statement, ...]
    queries: tuple[Query, ...]
    key: str = ""
    relation: str = ""
    value: str = ""
