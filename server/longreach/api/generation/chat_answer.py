"""The parts of a chat's answer as they are told to the caller: words, reasoning, calls."""

from __future__ import annotations

from longreach.engine.updates import FinishReason
from longreach.text.answer_reader import AnswerReader
from longreach.text.parts import Part


class PartReader:
    """Reads one answer; with `only_one`, the answer is over after its first call.

    Attributes:
        is_over: nothing that follows is wanted.
    """

    def __init__(self, reader: AnswerReader, only_one: bool = False) -> None:
        self.is_over = False
        self._reader = reader
        self._only_one = only_one
        self._begun = self._whole = 0

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after another piece of text."""
        return self._seen(self._reader.push(text))

    def flush(self, finish_reason: FinishReason) -> list[Part]:
        """The text has ended."""
        return self._seen(self._reader.flush(cut=finish_reason != "stop"))

    @property
    def has_tool_calls(self) -> bool:
        """Whether there were calls, and each of them is whole."""
        return 0 < self._begun == self._whole

    def _seen(self, parts: list[Part]) -> list[Part]:
        wanted: list[Part] = []
        for part in parts:
            if self.is_over:
                break
            wanted.append(part)
            self._begun += part.kind == "call"
            self._whole += part.kind == "call_end"
            self.is_over = self._only_one and self._whole > 0
        return wanted
