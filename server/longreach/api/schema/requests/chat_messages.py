"""The messages of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, PlainValidator, StringConstraints, model_validator

from longreach.api.schema.requests.fields import (
    MAX_TOOLS,
    StrictModel,
    check_levels,
    described,
    invalid,
    neutral,
    only,
)
from longreach.util import exact_json

TEXT_TYPES = {"text", "input_text", "output_text"}
_MAX_PARTS = 65536


def _content(value: object) -> str | None:
    """Text, as a string or in parts, which are joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("must be a string or a list of parts", "invalid_type")
    if not 0 < len(value) <= _MAX_PARTS:
        raise invalid(f"must have 1 to {_MAX_PARTS} parts")
    return "\n".join(_text(part) for part in value)


def _text(part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid("each part must be an object with a `type`", "invalid_type")
    if part["type"] not in TEXT_TYPES:
        raise invalid("only parts of the type `text` are supported", "unsupported_value")
    if not isinstance(part.get("text"), str):
        raise invalid("a part's `text` must be a string", "invalid_type")
    extra = part.keys() - {"type", "text"}
    if extra - {"annotations", "logprobs"} or any(part[name] not in (None, []) for name in extra):
        raise invalid("a text part has only `type` and `text`", "unsupported_value")
    return part["text"]


_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": _MAX_PARTS,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": sorted(TEXT_TYPES)},
                    "text": {"type": "string"},
                    "annotations": {"enum": [None, []]},
                    "logprobs": {"enum": [None, []]},
                },
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        },
        {"type": "null"},
    ]
}
Content = Annotated[str | None, PlainValidator(_content), described(_CONTENT_SCHEMA)]


class CalledFunction(StrictModel):
    """The function of a call in an earlier answer; `arguments` is a JSON object in a string."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    arguments: str

    @model_validator(mode="after")
    def _check_arguments(self) -> CalledFunction:
        self.parsed()
        return self

    def parsed(self) -> dict[str, Any]:
        """The arguments as chat templates want them."""
        try:
            value = exact_json.loads(self.arguments or "{}")
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise invalid("`arguments` must be a JSON object in a string")
        check_levels(value)
        return value


class ToolCall(StrictModel):
    """A call in an earlier answer."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction


class Message(StrictModel):
    """One message. `refusal`, `audio`, `annotations` and `function_call` may come back empty from an earlier answer."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Annotated[str | None, Field(max_length=256)] = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_TOOLS)] = None
    tool_call_id: Annotated[str | None, Field(max_length=256)] = None
    reasoning_content: str | None = None
    refusal: Annotated[None, only(None)] = neutral(None)
    audio: Annotated[None, only(None)] = neutral(None)
    function_call: Annotated[None, only(None)] = neutral(None)
    annotations: Annotated[list[Any] | None, only(None, [])] = neutral(None, [])

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        of_assistant = self.tool_calls is not None or self.reasoning_content is not None
        if of_assistant and self.role != "assistant":
            raise invalid("`tool_calls` and `reasoning_content` belong to messages of the assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise invalid("`tool_call_id` belongs to messages of a tool, and each of them needs one")
        if self.content is None and not self.tool_calls:
            raise invalid("`content` is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: absent members are absent, arguments are objects."""
        plain: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        for member in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, member)) is not None:
                plain[member] = value
        if self.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.parsed()},
                }
                for call in self.tool_calls
            ]
        return plain
