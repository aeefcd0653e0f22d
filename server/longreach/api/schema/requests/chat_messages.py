"""The messages of a chat, and what clients keep in a history."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainValidator, StringConstraints, create_model, model_validator

from longreach.api.schema.requests.fields import (
    MAX_LEVELS,
    MAX_TOOLS,
    StrictModel,
    described,
    invalid,
    is_deeper,
)
from longreach.api.schema.requests.file_parts import FILE_MEMBERS, file_text
from longreach.util import exact_json

TEXT_TYPES = {"text", "input_text", "output_text", "refusal"}
MAX_PARTS = 65536

# Members that clients keep in a history, from earlier answers of this and other servers or from libraries. They change
# no prompt. The typed decoding of long bodies skips them unread.
HARMLESS_OF_PARTS = (
    *("annotations", "cache_control", "id", "logprobs", "phase", "prompt_cache_breakpoint", "provider_options"),
)
_HARMLESS_OF_CALLS = ("cache_control", "extra_content", "index", "provider_specific_fields", "status")
_HARMLESS_OF_FUNCTIONS = ("parsed_arguments",)
_HARMLESS_OF_MESSAGES = (
    "annotations",
    "cache_control",
    "citations",
    "id",
    "metadata",
    "opts",
    "parsed",
    "phase",
    "provider_specific_fields",
    "reasoning_details",
    "reasoning_signature",
    "status",
    "thinking_blocks",
    "timestamp",
)
_SKIPPED: dict[str, Any] = {"x-class": "harmless"}
_Skipped = Annotated[None, PlainValidator(lambda _: None), described(_SKIPPED)]


def _harmless(name: str, members: Sequence[str]) -> type[StrictModel]:
    """A base class whose `members` are accepted with any value, which is forgotten."""
    note = "Kept in histories; changes nothing."
    fields: dict[str, Any] = {
        member: (_Skipped, Field(None, description=note, json_schema_extra=_SKIPPED)) for member in members
    }
    return create_model(name, __base__=StrictModel, __module__=__name__, **fields)


P = TypeVar("P")


def text_or_parts(value: object, read: Callable[[int, object], P]) -> str | list[P] | None:
    """A text, null, or a list of parts, each of which is given to `read` with its place."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("must be a string or a list of parts", "invalid_type")
    if len(value) > MAX_PARTS:
        raise invalid(f"must have at most {MAX_PARTS} parts")
    return [read(number, part) for number, part in enumerate(value)]


def _content(value: object) -> str | None:
    """Text, as a string or in parts, which are joined by newlines; for a file that is kept its mark stands there."""
    found = text_or_parts(value, _text)
    return "\n".join(found) if isinstance(found, list) else found


def _text(index: int, part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid("a part must be an object with a `type`", "invalid_type", at=index)
    kind = part["type"]
    if kind not in TEXT_TYPES and kind != "file":
        shown = f"only parts of the types `text` and `file` are supported, not `{kind[:64]}`"
        raise invalid(shown, "unsupported_value", at=index)
    member = kind if kind in ("refusal", "file") else "text"
    for name, value in part.items():
        if name not in ("type", member, *HARMLESS_OF_PARTS) and value not in (None, []):
            raise invalid(f"a part of this type has no member `{name[:64]}`", "unsupported_value", at=index)
    if kind == "file":
        return _file(part.get("file"), index)
    if not isinstance(part.get(member), str):
        raise invalid(f"a part's `{member}` must be a string", "invalid_type", at=index)
    return part[member]


def _file(file: object, index: int) -> str:
    if not isinstance(file, dict):
        raise invalid("a part's `file` must be an object", "invalid_type", at=index)
    if extra := {name for name, value in file.items() if value is not None} - FILE_MEMBERS.keys():
        raise invalid(f"a file has no member `{min(extra)[:64]}`", "unknown_parameter", at=f"{index}.file")
    return file_text(file, f"{index}.file")


def parts_schema(types: Iterable[str], members: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of text, as a string or in parts of these types, which may have these members, too."""
    part = {
        "type": "object",
        "properties": {
            "type": {"enum": sorted(types)},
            "text": {"type": "string"},
            "refusal": {"type": "string"},
            **members,
        },
        "required": ["type"],
        "additionalProperties": {"type": "null"},
    }
    return {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": MAX_PARTS, "items": part}, {"type": "null"}]}


_FILE_SCHEMA = {"type": "object", "properties": FILE_MEMBERS, "additionalProperties": {"type": "null"}}
_CONTENT_SCHEMA = parts_schema(
    {*TEXT_TYPES, "file"}, {"file": _FILE_SCHEMA, **dict.fromkeys(HARMLESS_OF_PARTS, _SKIPPED)}
)
Content = Annotated[str | None, PlainValidator(_content), described(_CONTENT_SCHEMA)]


class CalledFunction(_harmless("HarmlessOfFunction", _HARMLESS_OF_FUNCTIONS)):
    """The function of a call in an earlier answer.

    A model may have written a call badly, and its conversation has to go on: `arguments` may be any text, and `name`
    may be empty. Arguments that are no JSON object reach the chat template as `{"arguments": TEXT}`.
    """

    name: Annotated[str, StringConstraints(max_length=1024)]
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """The arguments as an object, whose integers are exact; NaN and Infinity are as the model wrote them."""
        if not self.arguments.strip():
            return {}
        try:
            value: object = exact_json.loads(self.arguments)
        except ValueError:
            value = self._with_constants()
        return value if isinstance(value, dict) and not is_deeper(value, MAX_LEVELS) else {"arguments": self.arguments}

    def object_text(self) -> str:
        """The arguments as the text of a JSON object: as they came, where they are one."""
        value = self.parsed()
        if value == {} or (value.keys() == {"arguments"} and value["arguments"] == self.arguments):
            return json.dumps(value, ensure_ascii=False)
        return self.arguments

    def _with_constants(self) -> object:
        try:
            value = json.loads(self.arguments)
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
        except (ValueError, RecursionError):
            return None
        return value


class ToolCall(_harmless("HarmlessOfCall", _HARMLESS_OF_CALLS)):
    """A call in an earlier answer. Some servers give it no `id`."""

    id: Annotated[str, StringConstraints(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_harmless("HarmlessOfMessage", _HARMLESS_OF_MESSAGES)):
    """One message. `reasoning` is another name of `reasoning_content`; a `refusal` is what the assistant said."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Annotated[str | None, Field(max_length=256)] = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_TOOLS)] = None
    tool_call_id: Annotated[str | None, Field(max_length=256)] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    prefix: Annotated[bool | None, Field(description="True on the last message: the answer goes on with it.")] = None

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.role != "assistant" and self._of_assistant():
            raise invalid("`tool_calls`, `reasoning_content` and `refusal` belong to messages of the assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise invalid("`tool_call_id` belongs to messages of a tool, and each of them needs one")
        if self.prefix and self.role != "assistant":
            raise invalid("`prefix` belongs to messages of the assistant")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise invalid("`content` is missing")
        return self

    def _of_assistant(self) -> bool:
        return bool(self.tool_calls) or any((self.reasoning_content, self.reasoning, self.refusal))

    def for_template(self, *, arguments_as_text: bool = False) -> dict[str, Any]:
        """The message as chat templates read it: absent members are absent, arguments are objects or their text."""
        said = "\n".join(text for text in (self.content, self.refusal) if text)
        plain: dict[str, Any] = {"role": self.role, "content": said}
        for member in ("name", "tool_call_id"):
            if (value := getattr(self, member)) is not None:
                plain[member] = value
        if (reasoning := self.reasoning_content or self.reasoning) is not None:
            plain["reasoning_content"] = reasoning
        if self.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.object_text() if arguments_as_text else call.function.parsed(),
                    },
                }
                for call in self.tool_calls
            ]
        return plain
