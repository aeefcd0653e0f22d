"""An item of a response while it is written: its object, and the events that tell of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import UNSET

from longreach.api.responses.custom_input import CustomInput
from longreach.api.schema.answers.chat import TokenLogprob
from longreach.api.schema.answers.responses import (
    CustomCallItem,
    FunctionCallItem,
    Item,
    ItemStatus,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from longreach.api.schema.requests.response_tools import OfferedTool
from longreach.text.parts import ToolCall

Kind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
# A type of event and its members.
Event = tuple[str, dict[str, Any]]

_PREFIXES: dict[Kind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
# Of each kind: what its text is called in events, and in their last one.
_TEXTS: dict[Kind, tuple[str, str]] = {
    "reasoning": ("reasoning_text", "text"),
    "message": ("output_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


class OpenItem:
    """An item of a response's output; a call has its `call`, and the `tool` that was offered for it."""

    def __init__(self, kind: Kind, call: ToolCall | None = None, tool: OfferedTool | None = None) -> None:
        self.kind: Kind = kind
        self.text = ""
        self._id = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
        self._place = 0
        self._call = call
        self._tool = tool
        self._logprobs: list[TokenLogprob] = []
        self._input = CustomInput() if kind == "custom_tool_call" else None

    def begin(self, place: int) -> Iterator[Event]:
        """The events that announce the item, at its place in the output."""
        self._place = place
        yield "response.output_item.added", {"output_index": self._place, "item": self.item("in_progress", empty=True)}
        if self._call is None:
            part = OutputText("") if self.kind == "message" else ReasoningText("")
            yield "response.content_part.added", {**self._members(), "part": part}

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        """More of its text, with the log-probabilities of tokens of a message."""
        if self.kind == "message":
            self._logprobs += logprobs
        yield from self._delta(text if self._input is None else self._input.push(text), logprobs)

    def end(self, status: ItemStatus) -> Iterator[Event]:
        """The events that end the item."""
        if self._input is not None:
            yield from self._delta(self._input.flush(is_whole=status == "completed"), [])
        text, member = _TEXTS[self.kind]
        done = {**self._members(), member: self.text}
        if self.kind == "message":
            done["logprobs"] = self._logprobs
        if self.kind == "function_call":
            done["name"] = self._name
        yield f"response.{text}.done", done
        if self._call is None:
            part = self._words() if self.kind == "message" else ReasoningText(self.text)
            yield "response.content_part.done", {**self._members(), "part": part}
        yield "response.output_item.done", {"output_index": self._place, "item": self.item(status)}

    def item(self, status: ItemStatus, empty: bool = False) -> Item:
        """The item's object; with `empty` as it begins."""
        if self.kind == "reasoning":
            return ReasoningItem(id=self._id, status=status, content=[] if empty else [ReasoningText(self.text)])
        if self.kind == "message":
            return OutputMessage(id=self._id, status=status, content=[] if empty else [self._words()])
        assert self._call is not None, "a call has its id"
        namespace = UNSET if self._tool is None or self._tool.namespace is None else self._tool.namespace
        common: dict[str, Any] = {
            "id": self._id,
            "status": status,
            "call_id": self._call.id,
            "name": self._name,
            "namespace": namespace,
        }
        if self.kind == "custom_tool_call":
            return CustomCallItem(**common, input=self.text)
        return FunctionCallItem(**common, arguments=self.text)

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        if not text and not logprobs:
            return
        self.text += text
        members = {**self._members(), "delta": text}
        if self.kind == "message":
            members["logprobs"] = logprobs
        yield f"response.{_TEXTS[self.kind][0]}.delta", members

    @property
    def _name(self) -> str:
        assert self._call is not None, "a call has a name"
        return self._call.name if self._tool is None else self._tool.name

    def _words(self) -> OutputText:
        return OutputText(self.text, logprobs=[*self._logprobs])

    def _members(self) -> dict[str, Any]:
        members: dict[str, Any] = {"item_id": self._id, "output_index": self._place}
        return members if self._call is not None else {**members, "content_index": 0}
