"""A sample and its parts: what is asked for, what was put where, and the tokens of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from training.recall.codec import Codec
from training.recall.facts import Phrasing
from training.recall.items import Item, Query, Statement

Family = Literal["facts", "chains", "pairs"]


@dataclass(frozen=True)
class Spec:
    """What to draw: `length` in tokens, answers included.

    With a `task` of `TASKS`, one question about what `compose` puts first, and `items` is how many others there are
    (None: as many as the task usually has). Without one, `items` of the `family` and up to `questions` of them asked
    for; this is what training uses. A family is `facts` of all kinds, `compounds` of them of several statements, or
    `chains` of variables alone, or `pairs` of UUIDs alone. `depth` in [0, 1] is where the first statement asked for
    stands. `early` puts the question before the document. `hard` documents are for a model that has learnt what others
    have to teach: longer lists, sentences that come again, questions that are rare.
    """

    length: int
    task: str | None = None
    items: int | None = None
    questions: int = 1
    form: str | None = None
    depth: float | None = None
    phrasing: Phrasing = "mixed"
    absent: float = 0.0  # the share of questions about something that the document does not state
    turns: int = 1  # document parts, each followed by some of the questions
    early: bool = False
    family: Family = "facts"
    compounds: float = 0.3
    hard: bool = False


@dataclass(frozen=True)
class Question:
    """One question of a sample; its answer's tokens are `ids[start:end]`, the last of them the end of sequence."""

    text: str
    form: str
    query: Query
    item: Item | None  # None where the document does not state the answer, or several items do
    start: int
    end: int

    @property
    def answer(self) -> str:
        """The right answer."""
        return self.query.answer


@dataclass(frozen=True)
class Sample:
    """`ids` (length,) int64; `target`, `lead` and `fork` (length,) bool mark answer tokens, the first of each value
    that says something, and those at which it parts from another value of the document that begins like it.
    """

    ids: np.ndarray
    target: np.ndarray
    lead: np.ndarray
    fork: np.ndarray
    questions: tuple[Question, ...]
    spans: tuple[tuple[Statement, int, int], ...]  # where each statement stands in `ids`

    def prompt(self, codec: Codec) -> str:
        """The text before the first answer, special tokens written out."""
        return codec.decode(self.ids[: self.questions[0].start])


@dataclass(frozen=True)
class Placed:
    """A statement as it goes into the text; `item` None for a sentence that states nothing."""

    item: Item | None
    statement: Statement
    ids: np.ndarray


@dataclass(frozen=True)
class Asked:
    """A question ready to be appended: its tokens, and its answer's; `opening` is text before the document."""

    text: str
    form: str
    query: Query
    item: Item | None
    before: np.ndarray
    after: np.ndarray
    opening: str = ""


class Forks:
    """What follows each beginning that values of a document have, by a hash of its tokens."""

    _END = -1

    def __init__(self, codec: Codec, items: Iterable[Item]) -> None:
        answers = {(query.answer, query.listed) for item in items for query in item.queries}
        values = {value for answer, listed in answers for value in (answer.split(", ") if listed else (answer,))}
        self._next: dict[int, set[int]] = {}
        for value in values:
            for before, token in self._steps(codec.encode(value).tolist()):
                self._next.setdefault(before, set()).add(token)

    def _steps(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        before = 0
        for token in (*tokens, self._END):
            yield before, token
            before = hash((before, token))

    def after(self, tokens: Sequence[int]) -> list[bool]:
        """Of each token of a value, and of what ends it, whether a value that begins like it goes on otherwise."""
        return [bool(self._next.get(before, set()) - {token}) for before, token in self._steps(tokens)]


class Assembly:
    """Token sequences put one after another, with notes of where answers and statements came to stand."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.pieces: list[np.ndarray] = []
        self.size = 0
        self.questions: list[Question] = []
        self.spans: list[tuple[Statement, int, int]] = []

    def add(self, ids: np.ndarray) -> None:
        """Append tokens."""
        self.pieces.append(ids)
        self.size += len(ids)

    def ask(self, asked: Asked) -> None:
        """Append a question and its answer."""
        self.add(asked.before)
        start = self.size
        self.add(asked.after)
        self.questions.append(Question(asked.text, asked.form, asked.query, asked.item, start, self.size))

    def finish(self, forks: Forks) -> Sample:
        """The sample that was put together, of a document with the values of `forks`."""
        ids = np.concatenate(self.pieces)
        target, lead, fork = (np.zeros(len(ids), bool) for _ in range(3))
        for question in self.questions:
            target[question.start : question.end] = True
            starts, ends = [question.start], [question.end - 1]
            if question.query.listed:  # each value of a list has to be found
                commas = question.start + np.flatnonzero(ids[question.start : question.end] == self.codec.comma)
                starts += (commas + 1).tolist()
                ends = [*commas.tolist(), *ends]
            for start, end in zip(starts, ends, strict=True):
                first = start + bool(self.codec.blank[ids[start]])
                lead[first] = True
                fork[first + 1 : end + 1] = forks.after(ids[first:end].tolist())[1:]
        return Sample(ids, target, lead, fork, tuple(self.questions), tuple(self.spans))
