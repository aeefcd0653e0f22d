"""Arguments that are written without quotes: what a text means is said by the schema of the function's parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from longreach.text.calls.json_text import JsonScanner

_ANY = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
# Python's names, which templates write where they do not ask for JSON.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MOST_SCHEMAS = 1000  # that are looked at for one parameter


def quoted(text: str) -> str:
    """A piece of a text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_text(parameters: Mapping[str, Any], name: str) -> bool:
    """Whether a parameter can only be a string, so that its text can be told while it is written."""
    return types_of(_member(parameters, name), parameters) == {"string"}


def json_of(text: str, parameters: Mapping[str, Any], name: str) -> str:
    """The JSON text of a value that was written without quotes.

    A text that is JSON of a type that the parameter may have stays as it is written. `True`, `False` and `None` are
    read as Python's. Everything else is a string, also where the schema wants none: then whoever checks it can say so.
    """
    schema = _member(parameters, name)
    types = types_of(schema, parameters)
    if types == {"string"} or text in _named(schema, parameters):
        return f'"{quoted(text)}"'
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    found = _type_of(bare)
    if found is None or found == "string" or not _allows(types, found, bare):
        return f'"{quoted(text)}"'
    return bare


def _allows(types: frozenset[str] | set[str], found: str, text: str) -> bool:
    if "string" not in types:
        return True  # it is JSON, and no string could be meant
    if found == "number":
        return "number" in types or ("integer" in types and float(text).is_integer())
    return found in types or (found == "integer" and "number" in types)


def _type_of(text: str) -> str | None:
    """The JSON type of a text; None if it is no JSON."""
    scanner = JsonScanner()
    if not text or scanner.feed(text) != len(text) or not scanner.end():
        return None
    first = text[0]
    if first in "-0123456789":
        return "number" if any(character in text for character in ".eE") else "integer"
    return {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean"}.get(first, "null")


def _member(parameters: Mapping[str, Any], name: str) -> Any:
    """The schema of one parameter; None where none is given."""
    for schema in alternatives(parameters, parameters):
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            return properties[name]
    for schema in alternatives(parameters, parameters):
        if isinstance(schema.get("additionalProperties"), dict):
            return schema["additionalProperties"]
    return None


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | set[str]:
    """The types that a value may have."""
    if not isinstance(schema, dict):
        return _ANY
    found: set[str] = set()
    for one in alternatives(schema, root):
        declared = one.get("type")
        if isinstance(declared, str):
            found.add(declared)
        elif isinstance(declared, list):
            found.update(kind for kind in declared if isinstance(kind, str))
        elif isinstance(values := one.get("enum", [one["const"]] if "const" in one else None), list):
            found.update(_type_of(json.dumps(value)) or "null" for value in values)
        elif not any(key in one for key in ("$ref", "anyOf", "oneOf", "allOf")):
            return _ANY
        if one.get("nullable") is True:
            found.add("null")
    return found & _ANY or _ANY


def _named(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The strings that the schema names as values."""
    if not isinstance(schema, dict):
        return set()
    found: set[str] = set()
    for one in alternatives(schema, root):
        values = [*(one["enum"] if isinstance(one.get("enum"), list) else ()), one.get("const")]
        found.update(value for value in values if isinstance(value, str))
    return found


def alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A schema, and those that it refers to or is made of, each once."""
    open_, seen = [schema], set()
    while open_ and len(seen) < _MOST_SCHEMAS:
        one = open_.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(reference := one.get("$ref"), str):
            meant = target(reference, root)
            open_ += [meant] if isinstance(meant, dict) else []
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(parts := one.get(key), list):
                open_ += [part for part in parts if isinstance(part, dict)]


def target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a pointer into the same schema names; None if it names nothing there."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
