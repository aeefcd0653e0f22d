"""The tools of a response, in the flat form of `/v1/responses`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints, TypeAdapter, model_validator

from longreach.api.schema.requests.fields import (
    MAX_TOOLS,
    StrictModel,
    check_levels,
    described,
    invalid,
    or_default,
)
from longreach.api.schema.requests.formats import MAX_DESCRIPTION, Function, JsonSchema, Name, Tool

MOST_OFFERED = 512
_MOST_SHOWN_CHARACTERS = 128  # as of a name without a namespace

# Members that OpenAI's tools have for its own services, and that change nothing here.
_Ignored = Any
_Description = Annotated[str | None, Field(max_length=MAX_DESCRIPTION)]


class FunctionTool(StrictModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments. Calls follow it unless
    `strict` is false, or is left out and no grammar can follow it."""

    type: Literal["function"]
    name: Name
    description: _Description = None
    parameters: Annotated[JsonSchema, or_default({})] = Field({}, validate_default=False)
    strict: bool | None = None
    output_schema: _Ignored = None
    defer_loading: _Ignored = None
    allowed_callers: _Ignored = None


class InputFormat(StrictModel):
    """What a custom tool's input may be: any text, or a sentence of a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str | None, Field(min_length=1)] = None

    @model_validator(mode="after")
    def _check_together(self) -> InputFormat:
        of_grammar = (self.syntax is not None, self.definition is not None)
        if of_grammar != ((self.type == "grammar"),) * 2:
            raise invalid("`syntax` and `definition` belong to the type `grammar`, which needs both")
        return self


class CustomTool(StrictModel):
    """A tool whose input is free text. The model sees a function with one string, `input`."""

    type: Literal["custom"]
    name: Name
    description: _Description = None
    format: InputFormat | None = None
    defer_loading: _Ignored = None
    allowed_callers: _Ignored = None


class NamespaceTool(StrictModel):
    """Tools under a common name; the model sees each as `namespace__name`."""

    type: Literal["namespace"]
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: _Description = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)]


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the model may call.

    Attributes:
        shown: the name that the model sees.
        namespace: the namespace that `name` belongs to, if any.
        kind: what a call of it is told as.
        function: what the chat template is given, under the name `shown`.
        grammar: of a custom tool's input, if it has one.
    """

    shown: str
    name: str
    namespace: str | None
    kind: Literal["function", "custom"]
    function: Function
    grammar: InputFormat | None = None

    @property
    def is_strict(self) -> bool:
        """Whether its calls follow its schema unless that says otherwise. `strict` is true by default in OpenAI's
        protocol; a custom tool has something to follow if there is a regular expression."""
        return self.kind == "function" or (self.grammar is not None and self.grammar.syntax == "regex")

    @property
    def tool(self) -> Tool:
        """The tool in the form of a chat's."""
        return Tool(type="function", function=self.function)


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request: as they were given, those that can be offered, and the types of those that cannot."""

    given: tuple[dict[str, Any], ...] = ()
    offered: tuple[OfferedTool, ...] = ()
    left_out: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.offered)


def shown_name(name: str, namespace: str | None) -> str:
    """The name under which the model sees a tool, of at most 128 characters."""
    if namespace is None:
        return name
    whole = f"{namespace.replace('.', '_')}__{name}"
    if len(whole) <= _MOST_SHOWN_CHARACTERS:
        return whole
    digest = hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()[:8]
    return f"{whole[: _MOST_SHOWN_CHARACTERS - 9]}_{digest}"


def custom_parameters(form: InputFormat | None) -> dict[str, Any]:
    """The JSON schema of the arguments with which the model writes a custom tool's input."""
    text: dict[str, Any] = {"type": "string"}
    if form is not None and form.definition is not None:
        text["description"] = f"A sentence of this grammar ({form.syntax}):\n{form.definition}"
        if form.syntax == "regex":
            text["pattern"] = f"^(?:{form.definition})$"
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


_FUNCTION, _CUSTOM, _NAMESPACE = TypeAdapter(FunctionTool), TypeAdapter(CustomTool), TypeAdapter(NamespaceTool)


def _tools(value: object) -> ToolSet:
    if value is None:
        return ToolSet()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid(f"must be a list of at most {MAX_TOOLS} tools", "invalid_type")
    offered: list[OfferedTool] = []
    left_out: dict[str, None] = {}
    for number, entry in enumerate(value):
        _add(entry, None, str(number), offered, left_out)
    if len(offered) > MOST_OFFERED:
        raise invalid(f"must have at most {MOST_OFFERED} functions, those of namespaces included")
    names = [tool.shown for tool in offered]
    if len(names) != len(set(names)):
        raise invalid("two tools have the same name")
    return ToolSet(tuple(filter(None, map(_echoed, value))), tuple(offered), tuple(left_out))


def _echoed(entry: dict[str, Any]) -> dict[str, Any] | None:
    """A tool as the response shows it; None of one that is left out."""
    if entry["type"] == "function":
        return {"description": None, "parameters": {}, "strict": None} | entry
    return entry if entry["type"] in ("custom", "namespace") else None


def _add(
    entry: object, namespace: str | None, where: str, offered: list[OfferedTool], left_out: dict[str, None]
) -> None:
    kind = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(kind, str) or not 0 < len(kind) <= 64:
        raise invalid(f"entry {where} must be an object with a `type`", "invalid_type")
    given = {name: inner for name, inner in entry.items() if inner is not None}
    for name in given.keys() - {"tools"}:
        check_levels(given[name])
    if kind == "function":
        one = _FUNCTION.validate_python(given)
        shown = shown_name(one.name, namespace)
        function = Function(name=shown, description=one.description, parameters=one.parameters, strict=one.strict)
        offered.append(OfferedTool(shown, one.name, namespace, "function", function))
    elif kind == "custom":
        custom = _CUSTOM.validate_python(given)
        shown = shown_name(custom.name, namespace)
        parameters = custom_parameters(custom.format)
        function = Function(name=shown, description=custom.description, parameters=parameters, strict=None)
        form = custom.format if custom.format is not None and custom.format.type == "grammar" else None
        offered.append(OfferedTool(shown, custom.name, namespace, "custom", function, form))
    elif kind == "namespace" and namespace is None:
        whole = _NAMESPACE.validate_python(given)
        for number, inner in enumerate(whole.tools):
            _add(inner, whole.name, f"{where}.tools.{number}", offered, left_out)
    else:
        left_out[kind if kind.isprintable() and kind.isascii() else "unknown"] = None


_TOOLS_SCHEMA = {
    "anyOf": [
        {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": {
                "anyOf": [
                    {"$ref": "#/components/schemas/FunctionTool"},
                    {"$ref": "#/components/schemas/CustomTool"},
                    {"$ref": "#/components/schemas/NamespaceTool"},
                    {
                        "type": "object",
                        "properties": {"type": {"type": "string", "minLength": 1, "maxLength": 64}},
                        "required": ["type"],
                    },
                ]
            },
        },
        {"type": "null"},
    ]
}
Tools = Annotated[ToolSet, PlainValidator(_tools), described(_TOOLS_SCHEMA)]
