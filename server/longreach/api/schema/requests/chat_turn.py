"""What every chat-like endpoint asks: the next turn of a conversation, whatever form the request had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.formats import Function, NamedTool, Tool
from longreach.api.schema.requests.structured_outputs import Form

ToolChoice = Literal["none", "auto", "required"] | NamedTool | None


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """The messages that are to be answered, and what the answer may or must be.

    Attributes:
        messages: the conversation so far.
        param: the request's field that the messages come from.
        tools: functions that the model may call; their names differ.
        tool_choice: as in OpenAI's API; None means auto.
        strict_by_default: functions whose calls follow their schemas where these can be followed, unless their `strict`
            is false.
        parallel_tool_calls: false ends the answer after its first call.
        form: the kind of grammar that the answer follows, and its text; None for free text.
        form_field: the request's field that the form comes from.
        variables: for the chat template; those that are None are not given.
        variable_fields: the request's fields that they come from, where those have another name.
        opens_answer: the prompt ends where a new message of the assistant begins.
        continues: the answer goes on with the last message.
        first_file: the id of the kept document that stands first in the messages.
    """

    messages: Sequence[Message]
    param: str
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = None
    strict_by_default: frozenset[str] = frozenset()
    parallel_tool_calls: bool = True
    form: Form | None = None
    form_field: str = "response_format"
    variables: Mapping[str, Any] = field(default_factory=dict)
    variable_fields: Mapping[str, str] = field(default_factory=dict)
    opens_answer: bool = True
    continues: bool = False
    first_file: str | None = None

    @property
    def offered(self) -> Sequence[Tool]:
        """The functions that may be called in this answer."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def forced(self) -> list[Function] | None:
        """The functions of which one must be called, or None if the model may choose to answer in words."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool.function for tool in self.tools if tool.function.name == name]
        return [tool.function for tool in self.tools] if self.tool_choice == "required" else None
