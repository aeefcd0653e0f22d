"""Answers of gpt-oss: a sequence of messages, each in a channel."""

from __future__ import annotations

from longreach.text.answer_reader import AnswerReader
from longreach.text.calls.cursor import Steps, UnreadableError
from longreach.text.calls.formats import HARMONY
from longreach.text.calls.harmony import CALL, CHANNEL, END, MESSAGE, RETURN, START, Header
from longreach.text.calls.offered import Offered

_ENDS = (END, CALL, RETURN)
_MARKS = (START, CHANNEL, MESSAGE, *_ENDS)


class HarmonyReader(AnswerReader):
    """Reads one answer to `prompt`: reasoning in the channel `analysis`, calls by their recipient, and words in all
    other channels. What is no message, and a call that cannot be read, is words to the character.

    With `formed`, the grammar `call_or_answer` is followed: a message in the channel `final` is the last one, whatever
    its text shows.
    """

    def __init__(
        self, prompt: str, offered: Offered, *, whole: bool = False, continues: bool = False, formed: bool = False
    ) -> None:
        super().__init__(None, HARMONY, offered, whole=whole, continues=continues)
        self._calls = HARMONY
        self._trims = not continues
        self._formed = formed
        self._begun = prompt.rpartition(START)[2]  # of the message that the answer goes on with

    def _read(self) -> Steps[None]:
        cursor = self._cursor
        header, in_message, _ = self._begun.partition(MESSAGE)
        if in_message:
            yield from self._read_body(Header.of(header))
        while not cursor.is_over:
            header = yield from self._next_header()
            if header is None:
                at = cursor.at
                text, _ = cursor.words(START, CHANNEL)
                yield from self._words(text or cursor.take(1), at)
            elif header.called(self._offered) is not None:
                yield from self._read_calls(HARMONY, "")
            elif header.recipient is not None:  # a tool that was not offered
                at = cursor.at
                yield from self._words(cursor.take(1), at)
            else:
                yield from cursor.until(MESSAGE)
                yield from self._read_body(header)
        yield from self._last_space()

    def _next_header(self) -> Steps[Header | None]:
        """The header that stands here, unread; None if there is none. Only the first may begin with its recipient."""
        cursor = self._cursor
        begins = (START, CHANNEL, " to=", "to=") if cursor.at == 0 else (START, CHANNEL)
        cursor.mark()
        try:
            begin = yield from cursor.expect(*begins)
            _, end = yield from cursor.until(*_MARKS)
            if end == CHANNEL and begin != CHANNEL:
                _, end = yield from cursor.until(*_MARKS)
            return Header.of(cursor.kept().removesuffix(MESSAGE)) if end == MESSAGE else None
        except UnreadableError:
            return None
        finally:
            cursor.rewind()

    def _read_body(self, header: Header) -> Steps[None]:
        """Read a message's text from behind its header, up to its end."""
        cursor = self._cursor
        if header.channel == "analysis":
            yield from self._tell_reasoning(_ENDS, START)
            return
        marks = (*_ENDS, START) if not self._formed else ()
        while not cursor.is_over:
            at = cursor.at
            text, mark = cursor.words(*marks)
            yield from self._words(text, at)
            if mark:
                cursor.take(len(mark) if mark in _ENDS else 0)
                return
            if not cursor.ended:
                yield None
