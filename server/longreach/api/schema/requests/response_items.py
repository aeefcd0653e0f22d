"""The items of a response's input: messages, reasoning, calls and their outputs, as `/v1/responses` gives them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, TypeAdapter, model_validator

from longreach.api.schema.requests.chat_messages import parts_schema, text_or_parts
from longreach.api.schema.requests.fields import MAX_MESSAGES, StrictModel, described, invalid
from longreach.api.schema.requests.file_parts import FILE_MEMBERS, file_text

Part = dict[str, Any]

MESSAGE_TYPES = frozenset({"text", "input_text", "output_text"})
CALL_TYPES = frozenset({"function_call", "custom_tool_call"})
OUTPUT_TYPES = frozenset({"function_call_output", "custom_tool_call_output"})
_TEXT_TYPES = MESSAGE_TYPES | {"reasoning_text", "summary_text", "refusal"}
_FILE = "input_file"
# Members of a part that say nothing to a model.
_OF_PART = {"annotations": {}, "logprobs": {}, "parsed": {}, "cache_control": {}, "prompt_cache_breakpoint": {}}
# Of a file, too: how its pages would be drawn, and what keeps it from being read here.
_OF_FILE = {**FILE_MEMBERS, "file_url": {"type": "string"}, "detail": {}}

# The members that an item of each type needs, and those that it may have. Every item may have an `id` and a `status`.
_MEMBERS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "message": (frozenset({"role", "content"}), frozenset({"phase", "name"})),
    "reasoning": (frozenset(), frozenset({"summary", "content", "encrypted_content"})),
    "function_call": (frozenset({"call_id", "name", "arguments"}), frozenset({"namespace", "parsed_arguments"})),
    "custom_tool_call": (frozenset({"call_id", "name", "input"}), frozenset({"namespace"})),
    "function_call_output": (frozenset({"call_id", "output"}), frozenset({"name", "namespace"})),
    "custom_tool_call_output": (frozenset({"call_id", "output"}), frozenset({"name", "namespace"})),
    "item_reference": (frozenset({"id"}), frozenset()),
}
_ANYWHERE = frozenset({"type", "id", "status", "created_by", "caller"})
_ASYNC = {"async", "async_"}  # of calls: the second is how openai-python dumps the first


def _parts(value: object) -> str | list[Part] | None:
    """A text, or a list of parts, each of which is a text or a file."""
    return text_or_parts(value, _part)


def _part(number: int, part: object) -> Part:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid("a part must be an object with a `type`", "invalid_type", at=number)
    if part["type"] == _FILE:
        return _file(number, part)
    if part["type"] not in _TEXT_TYPES:
        shown = part["type"][:64]
        raise invalid(f"only parts with text and files are supported, not `{shown}`", "unsupported_value", at=number)
    member = "refusal" if part["type"] == "refusal" else "text"
    if not isinstance(part.get(member), str):
        raise invalid(f"a part's `{member}` must be a string", "invalid_type", at=number)
    extra = {name for name, inner in part.items() if inner is not None} - {"type", member} - _OF_PART.keys()
    if extra:
        raise invalid(f"a part has no member `{min(extra)[:64]}`", "unsupported_value", at=number)
    return {"type": part["type"], member: part[member]}


def _file(number: int, part: Part) -> Part:
    given = {name: value for name, value in part.items() if value is not None}
    if "file_url" in given:
        why = "`file_url` is not supported: this server fetches nothing; send `file_data`, or a `file_id` of /v1/files"
        raise invalid(why, "unsupported_value", at=number)
    if extra := given.keys() - {"type"} - _OF_FILE.keys() - _OF_PART.keys():
        raise invalid(f"a file has no member `{min(extra)[:64]}`", "unsupported_value", at=number)
    file_text(given, number)
    return {"type": _FILE, **{name: given[name] for name in FILE_MEMBERS if name in given}}


_PARTS_SCHEMA = parts_schema(_TEXT_TYPES | {_FILE}, {**_OF_FILE, **_OF_PART})
Parts = Annotated[str | list[Part] | None, PlainValidator(_parts), described(_PARTS_SCHEMA)]


class InputItem(StrictModel):
    """An item of the input. Its `type` is message (the default), reasoning, function_call, function_call_output,
    custom_tool_call, custom_tool_call_output or item_reference; the other members are those of OpenAI's items."""

    type: Annotated[str, Field(max_length=64)] = Field("message", validate_default=False)
    id: Annotated[str | None, Field(max_length=256)] = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts = None
    phase: Annotated[str | None, Field(max_length=64)] = None
    name: Annotated[str | None, Field(max_length=256)] = None
    namespace: Annotated[str | None, Field(max_length=256)] = None
    call_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    arguments: str | None = None
    input: str | None = None
    output: Parts = None
    summary: Parts = None
    encrypted_content: str | None = None
    parsed_arguments: Any = None
    created_by: Annotated[str | None, Field(max_length=256)] = None
    caller: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        given = {name: inner for name, inner in value.items() if inner is not None and name not in _ASYNC}
        if "type" not in given and given.keys() == {"id"}:
            return {**given, "type": "item_reference"}
        return given

    @model_validator(mode="after")
    def _check_members(self) -> InputItem:
        if self.type not in _MEMBERS:
            known = ", ".join(_MEMBERS)
            raise invalid(f"items of this type are not supported; the types are {known}", "unsupported_value")
        needed, allowed = _MEMBERS[self.type]
        given = self.model_fields_set
        if missing := sorted(needed - given):
            raise invalid(f"an item of the type {self.type} needs `{missing[0]}`", "missing_required_parameter")
        if extra := sorted(given - needed - allowed - _ANYWHERE):
            raise invalid(f"an item of the type {self.type} has no `{extra[0]}`", "unknown_parameter")
        if self.role == "assistant" or self.type == "reasoning":
            parts = [part for one in (self.content, self.summary) if isinstance(one, list) for part in one]
            if any(part["type"] == _FILE for part in parts):
                raise invalid("what the model has said cannot have files", "unsupported_value")
        if self.encrypted_content:
            raise invalid(
                "`encrypted_content` is another server's and cannot be read here; leave the item out",
                "unsupported_value",
            )
        return self

    def stored(self) -> dict[str, Any]:
        """The item as it is kept and listed: without members that are absent."""
        kept = self.model_dump(exclude_none=True, exclude={"parsed_arguments", "caller", "created_by"})
        kept["type"] = self.type
        if self.type == "reasoning":
            kept["summary"] = _in_parts(self.summary, "summary_text")
            kept["content"] = _in_parts(self.content, "reasoning_text")
            return kept
        if self.type == "message":
            kept["content"] = _in_parts(self.content, "output_text" if self.role == "assistant" else "input_text")
        elif isinstance(self.output, list):
            kept["output"] = _in_parts(self.output, "input_text")
        return {"status": "completed", **kept}


def _in_parts(parts: str | list[Part] | None, kind: str) -> list[Part]:
    """Parts of one type, but for refusals."""
    more: Part = {"annotations": []} if kind == "output_text" else {}
    if parts is None or isinstance(parts, str):
        return [{"type": kind, "text": parts, **more}] if parts else []
    return [part if part["type"] in ("refusal", _FILE) else {**part, "type": kind, **more} for part in parts]


def text_of(parts: str | list[Part] | None) -> str:
    """The text of parts, which are joined by newlines; for a file that is kept its mark stands there."""
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "\n".join(map(_text, parts))


def _text(part: Part) -> str:
    if part["type"] == _FILE:
        return file_text(part)
    return part["refusal"] if part["type"] == "refusal" else part["text"]


_ITEMS = TypeAdapter(list[InputItem])


def _input(value: object) -> list[InputItem]:
    if isinstance(value, str):
        if not value:
            raise invalid("must not be empty")
        return [InputItem(type="message", role="user", content=value)]
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        raise invalid(f"must be a string or a list of at most {MAX_MESSAGES} items", "invalid_type")
    return _ITEMS.validate_python(value)


_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"$ref": "#/components/schemas/InputItem"}, "maxItems": MAX_MESSAGES},
    ]
}
Input = Annotated[list[InputItem], PlainValidator(_input), described(_INPUT_SCHEMA)]
