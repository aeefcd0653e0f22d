"""How a model that calls tools well uses the ones it is offered, whatever their names: read a file, edit it.

Programs offer the same abilities as `Read`, `read_file`, `view` or a shell. A tool is recognised by its name and by the
roles of its parameters; its arguments are filled in by role, and what else it requires by type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ROLES = {
    "path": {"path", "filepath", "file", "filename", "absolutepath", "targetfile", "relativepath", "uri"},
    "old": {"old", "oldstring", "oldstr", "oldtext", "search", "find", "oldcontent"},
    "new": {"new", "newstring", "newstr", "newtext", "replace", "replacement", "newcontent"},
    "command": {"command", "cmd", "commands", "script"},
    "patch": {"patch", "patchtext", "input", "diff"},
}
_READS = re.compile(r"(?!.*image)(read|view|cat|open)", re.IGNORECASE)
_SHELLS = re.compile(r"shell|bash|exec|command|terminal", re.IGNORECASE)
_ENDS = re.compile(r"(final_result|attempt_completion|submit|structured_?output|json$)", re.IGNORECASE)


@dataclass(frozen=True)
class Edit:
    """The change that is asked for: in the file `path`, write `new` for `old`."""

    path: str
    old: str
    new: str


def reading(tools: list[dict[str, Any]], edit: Edit) -> tuple[str, Any] | None:
    """The call that reads the file: the tool's name and its arguments; None if no tool can."""
    for tool in tools:
        if _READS.match(tool["name"]) and "path" in _roles(_parameters(tool)):
            return tool["name"], _fill(_parameters(tool), {"path": edit.path, "command": "view"})
    for tool in tools:
        if "path" in (roles := _roles(_parameters(tool))) and "view" in roles.get("command", {}).get("enum", ()):
            return tool["name"], _fill(_parameters(tool), {"path": edit.path, "command": "view"})
    return _in_shell(tools, f"cat {edit.path}")


def editing(tools: list[dict[str, Any]], edit: Edit, line: str) -> tuple[str, Any] | None:
    """The call that changes `line` of the file; None if no tool can."""
    changed = line.replace(edit.old, edit.new)
    values = {"path": edit.path, "old": line, "new": changed, "command": "str_replace"}
    for tool in tools:
        if {"old", "new", "path"} <= _roles(_parameters(tool)).keys():
            return tool["name"], _fill(_parameters(tool), values)
    for tool in tools:
        if "patch" in tool["name"].lower() and "patch" in _roles(_parameters(tool)):
            patch = f"*** Begin Patch\n*** Update File: {edit.path}\n@@\n-{line}\n+{changed}\n*** End Patch\n"
            return tool["name"], _fill(_parameters(tool), {"patch": patch})
    return _in_shell(tools, f"sed -i 's/{edit.old}/{edit.new}/' {edit.path}")


def ending(tools: list[dict[str, Any]], answer: str) -> tuple[str, Any] | None:
    """The call by which some programs want the answer itself; None if none is offered."""
    for tool in tools:
        if _ENDS.match(tool["name"]):
            return tool["name"], sample(_parameters(tool), answer)
    return None


def handing_over(tools: list[dict[str, Any]]) -> tuple[str, Any] | None:
    """The call that hands the conversation to another agent; None if none is offered."""
    for tool in tools:
        if tool["name"].startswith("transfer_to_"):
            return tool["name"], sample(_parameters(tool), "")
    return None


def sample(schema: Any, answer: str, root: Any = None) -> Any:
    """A value of a JSON schema; an integer is the number in `answer`, a string without a narrower rule is `answer`."""
    root = schema if root is None else root
    if not isinstance(schema, dict):
        return answer
    if "$ref" in schema:
        target = root
        for step in schema["$ref"].removeprefix("#").strip("/").split("/"):
            target = target[step] if step else target
        return sample(target, answer, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return sample(schema[several][0], answer, root)
    kind = _type(schema)
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: sample(properties[name], answer, root) for name in _required(schema) if name in properties}
    if kind == "array":
        return [sample(schema.get("items", {}), answer, root) for _ in range(max(1, schema.get("minItems", 0)))]
    number = int(found[0]) if (found := re.search(r"\d+", answer)) else 7
    return {"integer": number, "number": number, "boolean": True, "null": None}.get(kind, answer)


def _in_shell(tools: list[dict[str, Any]], command: str) -> tuple[str, Any] | None:
    for tool in tools:
        if _SHELLS.search(tool["name"]) and "command" in (roles := _roles(_parameters(tool))):
            if _type(roles["command"]) == "array" and _type(roles["command"].get("items", {})) == "string":
                named = tool["name"].endswith("s")  # a list of commands, not the words of one
                value: Any = [command] if named else ["bash", "-c", command]
                return tool["name"], _fill(_parameters(tool), {"command": value})
            return tool["name"], _fill(_parameters(tool), {"command": command})
    return None


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return tool.get("parameters") or {"type": "object"}


def _type(schema: dict[str, Any]) -> str:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    return next((one for one in kind if one != "null"), "null") if isinstance(kind, list) else kind


def _required(schema: dict[str, Any]) -> list[str]:
    return schema.get("required", list(schema.get("properties", {})))


def _role(name: str) -> str | None:
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((role for role, names in _ROLES.items() if plain in names), None)


def _members(schema: dict[str, Any]) -> dict[str, Any]:
    """The properties of an object, or of the objects in an array or a choice."""
    for several in ("anyOf", "oneOf"):
        for one in schema.get(several, ()):
            if found := _members(one):
                return found
    if _type(schema) == "array" and isinstance(schema.get("items"), dict):
        return _members(schema["items"])
    return schema.get("properties", {})


def _roles(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The roles that an object's properties can take, down to the objects in it, with the schema of each."""
    found: dict[str, dict[str, Any]] = {}
    for name, inner in _members(schema).items():
        if not isinstance(inner, dict):
            continue
        deeper = _roles(inner)
        found = {**deeper, **found}
        if not deeper and (role := _role(name)):
            found.setdefault(role, inner)
    return found


def _fill(schema: dict[str, Any], values: Mapping[str, Any], name: str = "") -> Any:
    """A value of the schema, with `values` by role where they have a place."""
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return _fill(next((one for one in schema[several] if _members(one)), schema[several][0]), values, name)
    role, kind = _role(name) or "", _type(schema)
    if kind == "array" and (isinstance(values.get(role), list)):
        return values[role]
    if kind == "array":
        return [_fill(schema.get("items", {"type": "string"}), values, name)]
    if kind == "object":
        wanted = {}
        for member, inner in schema.get("properties", {}).items():
            if member in _required(schema) or _has_place(member, inner, values):
                wanted[member] = _fill(inner, values, member)
        return wanted
    if role in values and values[role] is not None and not ("enum" in schema and values[role] not in schema["enum"]):
        return values[role]
    return sample(schema, "the file")


def _has_place(name: str, schema: Any, values: Mapping[str, Any]) -> bool:
    if not isinstance(schema, dict):
        return False
    return (_role(name) in values and not _members(schema)) or bool(
        _roles(schema).keys() & {"old", "new"} & values.keys()
    )
