"""The tools of Anthropic's protocol: those of the caller, Anthropic's own, and the choice among them.

| kind | what becomes of it |
|---|---|
| `custom`, or without a type | the model may call it |
| `bash_...`, `text_editor_...`, `memory_...` | the model may call it: the caller runs it, and its input is published |
| `web_search_...` and others that Anthropic's servers run | left out of what the model sees, and told in the answer |
| `computer_...`, `browser_...` | refused: its results are pictures |
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints, TypeAdapter, model_validator

from longreach.api.schema.requests.fields import StrictModel, check_levels, described, invalid, located, or_default
from longreach.api.schema.requests.formats import (
    MAX_DESCRIPTION,
    Function,
    JsonSchema,
    Name,
    NamedFunction,
    NamedTool,
    Tool,
)

MAX_MESSAGE_TOOLS = 512

_Kind = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]
_PICTURES = ("computer_", "browser_")


class MessageFunction(StrictModel):
    """A function that the model may call. `input_examples` are shown with its description.

    With `strict`, input follows `input_schema` also where the model chooses to call. `cache_control`, `defer_loading`
    and `eager_input_streaming` change nothing: every tool is offered from the beginning, and input is streamed as it is
    written.
    """

    name: Name
    input_schema: JsonSchema
    description: Annotated[str | None, Field(max_length=MAX_DESCRIPTION)] = None
    type: Literal["custom"] | None = None
    input_examples: Annotated[list[dict[str, Any]] | None, Field(max_length=64)] = None
    allowed_callers: Annotated[list[str] | None, Field(max_length=16)] = None
    strict: bool | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: Any = None

    def function(self) -> Function:
        """The tool as a chat's function."""
        description = self.description
        if self.input_examples:
            check_levels(self.input_examples)
            examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in self.input_examples)
            description = f"{description or ''}\n\nExamples of input:\n{examples}".lstrip()
        return Function(name=self.name, description=description, parameters=self.input_schema, strict=self.strict)


@dataclass(frozen=True)
class MessageTool:
    """A tool by its name; `function` is what the model may call, or None if the tool is left out as one of `kind`."""

    name: str
    kind: str
    function: Function | None


def _string(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*names]}


_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_EDITS = {
    "file_text": _string("For create: the whole text of the file."),
    "old_str": _string("For str_replace: the text to replace; it must occur once."),
    "new_str": _string("For str_replace: the text that takes its place."),
    "insert_line": {"type": "integer", "description": "For insert: the line after which the text goes; 0 is the top."},
    "insert_text": _string("For insert: the text."),
    "view_range": {**_RANGE, "description": "For view: the first and the last line; -1 is the end."},
}

# By the beginning of the kind: what a tool is for, and its input as Anthropic documents it.
_RUN_BY_CALLER: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a bash shell that lives on between calls.",
        _object(
            [],
            command=_string("The command; needed unless the shell is restarted."),
            restart={"type": "boolean", "description": "True starts the shell anew."},
        ),
    ),
    "text_editor_": (
        "View, create and edit text files.",
        _object(
            ["command", "path"],
            command=_commands("view", "create", "str_replace", "insert"),
            path=_string("The path of the file or folder."),
            **_EDITS,
        ),
    ),
    "memory_": (
        "Keep notes in files under /memories, which stay after this conversation.",
        _object(
            ["command"],
            command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            path=_string("A path under /memories."),
            old_path=_string("For rename: the path so far."),
            new_path=_string("For rename: the new path."),
            **_EDITS,
        ),
    ),
}
_CUSTOM = TypeAdapter(MessageFunction)


def _tool(value: object) -> MessageTool:
    if not isinstance(value, dict):
        raise invalid("must be an object", "invalid_type")
    kind = value.get("type")
    if kind is None or kind == "custom":
        own = _CUSTOM.validate_python(value)
        # What only programs on Anthropic's servers may call, nobody calls here.
        callable_ = not own.allowed_callers or "direct" in own.allowed_callers
        return MessageTool(own.name, "custom", own.function() if callable_ else None)
    return _known(kind, value)


def _known(kind: object, value: dict[str, Any]) -> MessageTool:
    """One of Anthropic's own tools."""
    if not isinstance(kind, str) or not kind or len(kind) > 64:
        raise invalid("`type` must be a string of 1 to 64 characters", "invalid_type")
    if kind.startswith(_PICTURES):
        raise invalid(
            f"tools of the kind `{kind}` are not supported, since their results are pictures", "unsupported_value"
        )
    name = value.get("name", value.get("mcp_server_name", kind))
    if not isinstance(name, str) or not 0 < len(name) <= 128:
        raise invalid("`name` must be a string of 1 to 128 characters", "invalid_type")
    for beginning, (description, parameters) in _RUN_BY_CALLER.items():
        if kind.startswith(beginning):
            function = Function(name=name, description=description, parameters=parameters, strict=None)
            return MessageTool(name, kind, function)
    return MessageTool(name, kind, None)


_TOOL_SCHEMA = {
    "anyOf": [
        {"$ref": "#/components/schemas/MessageFunction"},
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "pattern": r"^(?!custom$|computer_|browser_)[\s\S]{1,64}$"},
                "name": {"type": "string", "minLength": 1, "maxLength": 128},
            },
            "required": ["type"],
        },
    ]
}
AnyTool = Annotated[MessageTool, PlainValidator(_tool), described(_TOOL_SCHEMA)]


class MessageToolChoice(StrictModel):
    """`tool_choice`: auto, any, none, or one tool. `disable_parallel_tool_use` ends the answer after its first call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    disable_parallel_tool_use: Annotated[bool, or_default(False)] = False

    @model_validator(mode="after")
    def _check_name(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise invalid("`name` belongs to the type `tool`, which needs it")
        return self


@dataclass(frozen=True)
class ToolSelection:
    """What a chat's turn is told of tools, and the kinds of those that are left out."""

    tools: list[Tool]
    choice: Literal["none", "auto", "required"] | NamedTool | None
    parallel: bool
    left_out: list[str]


def select(tools: list[MessageTool], choice: MessageToolChoice | None) -> ToolSelection:
    """The tools of a request as a chat has them.

    Raises:
        ValidationError: two have one name, or the choice is of a tool that is not there, or is left out.
    """
    names = [tool.name for tool in tools]
    if len(names) != len(set(names)):
        raise located(invalid("two tools have the same name"), "tools")
    functions = [tool.function for tool in tools if tool.function is not None]
    left_out = [*dict.fromkeys(tool.kind for tool in tools if tool.function is None)]
    offered = [Tool(type="function", function=function) for function in functions]
    if choice is None:
        return ToolSelection(offered, None, True, left_out)
    parallel = not choice.disable_parallel_tool_use
    if choice.type in ("auto", "none"):
        return ToolSelection(offered, "none" if choice.type == "none" else None, parallel, left_out)
    if choice.type == "any":
        if not offered:
            raise located(invalid("there is no tool in `tools` that this server offers to the model"), "tool_choice")
        return ToolSelection(offered, "required", parallel, left_out)
    kind = next((tool.kind for tool in tools if tool.name == choice.name), None)
    if kind is None:
        raise located(invalid("there is no such tool in `tools`"), "tool_choice")
    if not any(function.name == choice.name for function in functions):
        why = f"a tool of the kind `{kind}` cannot be forced, since this server does not run it"
        raise located(invalid(why, "unsupported_value"), "tool_choice")
    named = NamedTool(type="function", function=NamedFunction(name=choice.name or ""))
    return ToolSelection(offered, named, parallel, left_out)
