"""Answers that are calls or something else, as a grammar has it: the first mark decides."""

from __future__ import annotations

from longreach.text.answer_reader import AnswerReader
from longreach.text.calls.cursor import Steps
from longreach.text.reasoning import ReasoningMarks


class CallOrAnswerReader(AnswerReader):
    """Reads one answer whose grammar is that of `call_or_answer`.

    Behind its reasoning, an answer that does not begin with a mark of calls has none: what looks like a call within it,
    as in a string of a JSON answer, is words.
    """

    def _read(self) -> Steps[None]:
        cursor, marks = self._cursor, self._reasoning
        if marks is not None:
            opened = "" if self._reasons else (yield from cursor.accept(*marks.opens))
            if self._reasons or opened:
                yield from self._read_reasoning()
                yield from cursor.blank()
        self._reasoning: ReasoningMarks | None = None
        self._reasons = False
        opens = () if self._calls is None else self._calls.opens
        while not cursor.rest.startswith(opens):
            if cursor.ended or not any(mark.startswith(cursor.rest) for mark in opens):
                self._calls = None
                break
            yield None
        yield from super()._read()
