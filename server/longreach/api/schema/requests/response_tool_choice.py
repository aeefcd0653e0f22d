"""The choice among the tools of a response, in the flat form of `/v1/responses`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from longreach.api.schema.requests.fields import check_levels, described, invalid
from longreach.api.schema.requests.response_tools import MOST_OFFERED, ToolSet, shown_name


@dataclass(frozen=True)
class Choice:
    """A tool choice: the mode, and the tools that it is restricted to, by their shown names; None for all.

    Attributes:
        given: the choice as it came.
        single: one tool is named, and has to be called.
    """

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None
    single: bool = False
    given: Any = "auto"


def _choice(value: object) -> Choice | None:
    if value is None:
        return None
    if value in ("none", "auto", "required"):
        return Choice(value, given=value)  # pyright: ignore[reportArgumentType] - one of these
    check_levels(value)
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise invalid("must be none, auto, required, or an object with a `type`", "invalid_type")
    kind = value["type"]
    if kind in ("function", "custom"):
        _only_members(value, {"type", "name", "namespace"})
        return Choice("required", frozenset({_named(value)}), True, value)
    if kind != "allowed_tools":
        raise invalid(
            f"a tool of the type {kind[:64]} cannot be forced: this server does not run it", "unsupported_value"
        )
    _only_members(value, {"type", "mode", "tools"})
    allowed = value.get("tools")
    if value.get("mode") not in ("auto", "required") or not isinstance(allowed, list) or len(allowed) > MOST_OFFERED:
        raise invalid("`allowed_tools` needs a `mode`, auto or required, and a list of `tools`")
    if not all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in allowed):
        raise invalid("each entry of `tools` must be an object with a `type`", "invalid_type")
    names = frozenset(_named(one) for one in allowed if one["type"] in ("function", "custom"))
    return Choice(value["mode"], names, False, value)


def _named(value: dict[str, Any]) -> str:
    name, namespace = value.get("name"), value.get("namespace")
    if not isinstance(name, str) or not (namespace is None or isinstance(namespace, str)):
        raise invalid("`name` must be the name of a tool", "invalid_type")
    return shown_name(name, namespace)


def _only_members(value: dict[str, Any], known: set[str]) -> None:
    if extra := [name for name, inner in value.items() if inner is not None and name not in known]:
        raise invalid(f"there is no member {extra[0][:64]!r}", "unknown_parameter")


_NAMED_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["function", "custom"]}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_ALLOWED_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": {"type": "object"}, "maxItems": MOST_OFFERED},
    },
    "required": ["type", "mode", "tools"],
}
_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_SCHEMA, _ALLOWED_SCHEMA]}
ToolChoice = Annotated[Choice | None, PlainValidator(_choice), described(_CHOICE_SCHEMA)]


def check_choice(choice: Choice | None, tools: ToolSet) -> None:
    """Refuse a choice that the tools cannot fulfil.

    Raises:
        PydanticCustomError: it names a tool that is not there, or requires a call where there is none to make.
    """
    if choice is None or choice.mode == "none":
        return
    shown = {tool.shown: tool for tool in tools.offered}
    if choice.names is not None and (unknown := sorted(choice.names - shown.keys())):
        raise invalid(f"there is no tool {unknown[0][:64]!r} in `tools`")
    chosen = [tool for tool in tools.offered if choice.names is None or tool.shown in choice.names]
    if choice.mode == "required":
        if not chosen:
            why = f", and {', '.join(tools.left_out)} cannot be run here" if tools.left_out else ""
            raise invalid(f"a call is required, but there is no function or custom tool to call{why}")
        if any(tool.grammar is not None and tool.grammar.syntax == "lark" for tool in chosen):
            raise invalid(
                "a Lark grammar of a custom tool cannot be enforced in a forced call; use a regex or the choice auto",
                "unsupported_value",
            )
