"""Whether two schemas can have no text in common: then `oneOf` is `anyOf`, which a grammar can follow."""

from __future__ import annotations

import json
from collections.abc import Iterable

from longreach.api.service.json_schema.document import Document, Schema, is_schema, required_names

# An integer is a number; `fraction` is any other.
_KINDS = {
    "null": {"null"}, "boolean": {"boolean"}, "integer": {"integer"}, "number": {"integer", "fraction"},
    "string": {"string"}, "array": {"array"}, "object": {"object"},
}  # fmt: skip
_ALL = set().union(*_KINDS.values())
_DEPTH = 5


def overlap(document: Document, branches: list[object], *, closed: bool) -> tuple[int, int] | None:
    """Two of `branches` that may have a text in common, by their places; None if there are none.

    With `closed`, a branch is written without members that it does not name.
    """
    for right in range(len(branches)):
        for left in range(right):
            pair = branches[left], branches[right]
            if not _apart(document, *pair, _DEPTH) and not (
                closed and _lacks(document, *pair) and _lacks(document, *reversed(pair))
            ):
                return left, right
    return None


def _apart(document: Document, one: object, other: object, depth: int) -> bool:
    one, other = _behind(document, one), _behind(document, other)
    if one is False or other is False:
        return True
    if depth == 0 or not is_schema(one) or not is_schema(other):
        return False
    kinds = _kinds(document, one, depth), _kinds(document, other, depth)
    if not kinds[0] & kinds[1]:
        return True
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None and not values[0] & values[1]:
        return True
    for left, right in ((one, other), (other, one)):
        for keyword in ("anyOf", "oneOf"):
            branches = left.get(keyword)
            if branches and all(_apart(document, branch, right, depth - 1) for branch in branches):
                return True
        if any(_apart(document, part, right, depth - 1) for part in left.get("allOf") or ()):
            return True
    common = kinds[0] & kinds[1]
    if common == {"object"}:
        return _objects_apart(document, one, other, depth)
    return common <= {"integer", "fraction"} and (_above(one, other) or _above(other, one))


def _objects_apart(document: Document, one: Schema, other: Schema, depth: int) -> bool:
    for name in dict.fromkeys([*required_names(one), *required_names(other)]):
        pair = _member(one, name), _member(other, name)
        if None not in pair and _apart(document, *pair, depth - 1):
            return True
    return any(
        left.get("additionalProperties") is False and _lacks(document, left, right)
        for left, right in ((one, other), (other, one))
    )


def _lacks(document: Document, one: object, other: object) -> bool:
    """Whether `other` requires a member that `one` does not name."""
    one, other = _behind(document, one), _behind(document, other)
    if not is_schema(one) or not is_schema(other) or not isinstance(one.get("properties"), dict):
        return False
    if any(keyword in one for keyword in ("patternProperties", "$ref", "allOf", "anyOf", "oneOf")):
        return False
    if one.get("additionalProperties", False) is not False or other.get("type") != "object":
        return False
    return any(name not in one["properties"] and name not in required_names(one) for name in required_names(other))


def _kinds(document: Document, schema: object, depth: int) -> set[str]:
    schema = _behind(document, schema)
    if schema is False:
        return set()
    if not is_schema(schema) or depth == 0:
        return _ALL
    found = _ALL
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found = found & set().union(*(_KINDS.get(one, _ALL) for one in types if isinstance(one, str)))
    if (values := _given(schema)) is not None:
        found = found & {_kind(value) for value in values}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            found = found & set().union(*(_kinds(document, one, depth - 1) for one in schema[keyword]))
    for part in schema.get("allOf") or []:
        found = found & _kinds(document, part, depth - 1)
    return found


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "fraction"
    return {str: "string", list: "array", dict: "object"}.get(type(value), "null")


def _given(schema: Schema) -> Iterable[object] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _values(schema: Schema) -> set[str] | None:
    values = _given(schema)
    return None if values is None else {json.dumps(_plain(value), sort_keys=True) for value in values}


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _member(schema: Schema, name: str) -> object:
    """The schema of a member; None where it is not known."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        return False
    return None


def _above(one: Schema, other: Schema) -> bool:
    """Whether all numbers of `one` are greater than those of `other`."""
    least, most = one.get("minimum"), other.get("maximum")
    return isinstance(least, int | float) and isinstance(most, int | float) and least > most


def _behind(document: Document, schema: object) -> object:
    """The schema that a lone reference leads to."""
    if is_schema(schema) and [*schema] == ["$ref"]:
        return document.target(schema["$ref"])
    return schema
