"""Words, reasoning and calls of functions, told apart while an answer is written.

What looks like a call and cannot be read is words, to the character, and calls behind it are still read. So is a call
that was cut, unless its beginning has been told already.
"""

from __future__ import annotations

from longreach.text.calls.cursor import BLANK, Cursor, Steps, UnreadableError
from longreach.text.calls.formats import CallFormat
from longreach.text.calls.offered import Offered
from longreach.text.parts import Part
from longreach.text.reasoning import ReasoningMarks


class AnswerReader:
    """Reads one answer, whatever pieces it arrives in; without arguments, all of it is words.

    Arguments:
        reasoning: the marks around reasoning; None if there are none.
        calls: how calls are written; None if none are to be told.
        offered: the functions that may be called.
        reasons: the answer begins inside of reasoning.
        whole: calls are told once they are whole, for answers that are not sent before they end. Otherwise their
            arguments are told as they are written, and a call that then breaks off has no `call_end`.
        continues: the answer goes on with a message, so that the blank space at its beginning stands between words.
    """

    def __init__(
        self,
        reasoning: ReasoningMarks | None = None,
        calls: CallFormat | None = None,
        offered: Offered | None = None,
        *,
        reasons: bool = False,
        whole: bool = False,
        continues: bool = False,
    ) -> None:
        self._cursor = Cursor()
        self._reasoning = reasoning
        self._offered = Offered() if offered is None else offered
        self._calls = calls if self._offered.names else None
        self._reasons = reasons
        self._whole = whole
        self._trims = not continues and (reasoning is not None or (calls is not None and bool(calls.opens)))
        self._spoke = False  # blank space before the first word is not passed on
        self._silent = True  # no word has come since the beginning, or the last reasoning or call
        self._fresh = True  # nothing has been looked for since the beginning or the last reasoning
        self._called = False  # a call has come since the last word
        self._space = ""  # behind the last word; the space around calls is no part of an answer that ends with them
        self._frame = ""  # the mark that ends the words
        self._told = 0  # the text up to this place has been told as a call's
        self._steps = self._read()

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after another piece of text."""
        self._cursor.add(text)
        return self._certain() if text else []

    def flush(self, cut: bool = False) -> list[Part]:
        """The text has ended; `cut` if the model would have gone on."""
        self._cursor.ended, self._cursor.cut = True, cut
        return self._certain()

    def _certain(self) -> list[Part]:
        parts = []
        for part in self._steps:
            if part is None:
                break
            parts.append(part)
        return parts

    def _read(self) -> Steps[None]:
        cursor = self._cursor
        if self._reasons:
            yield from self._read_reasoning()
        while not cursor.is_over:
            if self._fresh and self._calls is not None and self._calls.unmarked:
                self._fresh = False
                yield from self._read_calls(self._calls, "")
            calls = () if self._calls is None else self._calls.opens
            reasoning = () if self._reasoning is None or not self._silent else self._reasoning.opens
            frames = self._frames()
            at = cursor.at
            text, mark = cursor.words(*calls, *reasoning, *frames)
            yield from self._words(text, at)
            if mark in calls and self._calls is not None:
                yield from self._read_calls(self._calls, mark)
            elif mark and mark == self._frame:
                yield from self._end_frame()
            elif mark in frames and self._silent:
                cursor.take(len(mark))
                self._frame = frames[mark]
            elif mark and self._silent:
                cursor.take(len(mark))
                yield from self._read_reasoning()
            elif not text and not mark and not cursor.ended:
                yield None
        yield from self._last_space()

    def _words(self, text: str, at: int) -> Steps[None]:
        """Tell words that stand `at` this place, except those that have been told as a call's."""
        text = self._space + text[max(self._told - at, 0) :]
        if self._trims and not self._spoke:
            text = text.lstrip()
        words = text if self._calls is None and not self._frame else text.rstrip(BLANK)
        self._space = text[len(words) :]
        if words:
            self._spoke, self._silent, self._called = True, False, False
            yield Part("content", words)

    def _frames(self) -> dict[str, str]:
        """The marks that may begin the words, and those that then end them; or the one that does."""
        if self._frame:
            return {self._frame: ""}
        return dict(self._reasoning.frames) if self._reasoning is not None and self._silent else {}

    def _end_frame(self) -> Steps[None]:
        """Read the mark that ends the words, and what stands behind it: words where that is more than blank space."""
        cursor, at = self._cursor, self._cursor.at
        cursor.mark()
        cursor.take(len(self._frame))
        yield from cursor.blank()
        text = cursor.kept()
        cursor.forget()
        if cursor.is_over:
            self._space = ""
        else:
            yield from self._words(text, at)

    def _last_space(self) -> Steps[None]:
        if self._space and not self._called:
            yield Part("content", self._space)

    def _read_reasoning(self) -> Steps[None]:
        """Read reasoning from behind its mark, up to what closes it or to the end."""
        assert self._reasoning is not None
        yield from self._tell_reasoning(self._reasoning.closes)
        self._silent = self._fresh = True

    def _tell_reasoning(self, closes: tuple[str, ...], *others: str) -> Steps[None]:
        """Read reasoning up to a mark that closes it, which is read, too, or another one that comes after it."""
        cursor, starting = self._cursor, True
        while True:
            text, mark = cursor.words(*closes, *others)
            cursor.take(len(mark) if mark in closes else 0)
            if starting:
                text = text.lstrip()
                starting = not text
            if text:
                yield Part("reasoning", text)
            if mark or cursor.is_over:
                return
            yield None

    def _read_calls(self, calls: CallFormat, mark: str) -> Steps[None]:
        """Read calls from their mark on; where they cannot be read, that text is words."""
        cursor = self._cursor
        teller = _Whole() if self._whole else _AsWritten()
        cursor.mark()
        cursor.take(len(mark))
        try:
            for part in calls.read(cursor, self._offered, mark):
                if part is None:
                    yield None
                    continue
                for told in teller.tell(part, cursor.at):
                    self._called = self._silent = True
                    yield told
                self._told = max(self._told, teller.told)
                if part.kind == "call_end":
                    mark = ""  # what is read next begins here
                    cursor.mark()
        except UnreadableError:
            yield from self._unread(calls, mark)
        else:
            cursor.forget()

    def _unread(self, calls: CallFormat, mark: str) -> Steps[None]:
        """Tell as words what has been read since the mark, and go on behind what cannot be a call."""
        cursor = self._cursor
        at = cursor.at - len(cursor.kept())
        if cursor.ended or calls.nests:
            text = cursor.kept()
            cursor.forget()
        else:
            cursor.rewind()
            text = cursor.take(len(mark))
        if cursor.ended:
            text += cursor.take_all()
        yield from self._words(text, at)


class _Whole:
    """Tells calls once they are whole.

    Attributes:
        told: the text up to this place has been told.
    """

    def __init__(self) -> None:
        self.told = 0
        self._held: list[Part] = []

    def tell(self, part: Part, at: int) -> list[Part]:
        """What may be told, now that a part has been read up to a place."""
        self._held.append(part)
        if part.kind != "call_end":
            return []
        self.told = at
        held, self._held = self._held, []
        return held


class _AsWritten:
    """Tells calls while they are written, but not the end of their arguments before that of the call: the arguments of
    a call that breaks off are never a whole object.

    Attributes:
        told: the text up to this place has been told.
    """

    def __init__(self) -> None:
        self.told = 0
        self._held = ""

    def tell(self, part: Part, at: int) -> list[Part]:
        """As `_Whole.tell`."""
        if part.kind == "call":
            self.told = at
            return [part]
        if part.kind == "call_end":
            self.told = at
            held, self._held = self._held, ""
            return [Part("arguments", held), part] if held else [part]
        text = self._held + part.text
        self._held = "}" if text.endswith("}") else ""
        text = text.removesuffix("}")
        # A brace by itself may be the reader's own, and no character of the text.
        self.told = self.told + len(text) if part.text == "}" else at - len(self._held)
        return [Part("arguments", text)] if text else []
