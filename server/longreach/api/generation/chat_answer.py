"""The parts of a chat's answer as they are told to the caller: words, reasoning, calls."""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from longreach.api.schema.requests.formats import Function
from longreach.engine.messages import FinishReason
from longreach.text.answer_format import AnswerReader, Part, whole_call


class PartReader(Protocol):
    """Reads one answer.

    Attributes:
        has_tool_calls: there were calls, and each of them is whole.
        is_over: nothing that follows is wanted.
    """

    is_over: bool

    @property
    def has_tool_calls(self) -> bool: ...

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after another piece of text."""
        ...

    def flush(self, finish_reason: FinishReason) -> list[Part]:
        """The text has ended."""
        ...


class ChatReader:
    """Words, reasoning and calls as the model marks them; with `only_one`, the answer is over after its first call."""

    def __init__(self, reader: AnswerReader | None = None, only_one: bool = False) -> None:
        self.is_over = False
        self._begun = self._whole = 0
        self._reader = AnswerReader(None) if reader is None else reader
        self._only_one = only_one

    def push(self, text: str) -> list[Part]:
        """As `PartReader.push`."""
        return self._seen(self._reader.push(text))

    def flush(self, finish_reason: FinishReason) -> list[Part]:
        """As `PartReader.flush`."""
        return self._seen(self._reader.flush())

    @property
    def has_tool_calls(self) -> bool:
        """As `PartReader.has_tool_calls`."""
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


def tool_call_schema(functions: list[Function], named: bool, parallel: bool) -> dict[str, Any]:
    """The JSON schema of an answer that has to call: one function's arguments, or a list of calls."""
    if named:
        return functions[0].parameters or {"type": "object"}
    one_of = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "parameters": function.parameters or {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return {"type": "array", "items": {"anyOf": one_of}, "minItems": 1, **({} if parallel else {"maxItems": 1})}


class ForcedToolCalls:
    """An answer whose grammar makes it calls: the arguments of the function `name`, or a list of calls.

    An answer that was cut short is no JSON, and so no call: its text is told as it is.
    """

    def __init__(self, name: str | None) -> None:
        self.has_tool_calls = self.is_over = False
        self._name = name
        self._text = ""

    def push(self, text: str) -> list[Part]:
        """As `PartReader.push`."""
        self._text += text
        return []

    def flush(self, finish_reason: FinishReason) -> list[Part]:
        """As `PartReader.flush`."""
        try:
            value = orjson.loads(self._text)
        except orjson.JSONDecodeError:
            return [Part("content", self._text)] if self._text else []
        self.has_tool_calls = True
        if self._name is not None:
            return whole_call(self._name, self._text)
        calls = [(call["name"], orjson.dumps(call["parameters"]).decode()) for call in value]
        return [part for name, arguments in calls for part in whole_call(name, arguments)]
