"""The JSON schema of an answer that has to call functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from longreach.api.schema.requests.formats import Function

_ANY_OBJECT = {"type": "object"}
# Keywords whose values are schemas by name, and those whose values are no schemas.
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
_DATA = {"const", "enum", "default", "examples", "example", "required"}


def call_schema(functions: Sequence[Function], named: bool, parallel: bool) -> dict[str, Any]:
    """The schema of one function's arguments if `named`, or of a list of calls; of one call unless `parallel`.

    In a list, functions' parameters are definitions. Their pointers are written anew from the root of the whole
    schema, so that `#` and `#/$defs/...` mean the same as they do in the parameters by themselves.
    """
    if named:
        return arguments_schema(functions[0])
    calls, definitions = call_objects(functions)
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": definitions}


def call_objects(functions: Sequence[Function]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Schemas of calls as JSON objects, and the definitions that they refer to.

    Functions whose arguments have equal schemas share one, so that what grows with their number is their names.
    """
    calls, definitions = [], {}
    for number, (function, *others) in _alike(functions).items():
        name = f"call{number}"
        names = {"enum": [function.name, *(other.name for other in others)]} if others else {"const": function.name}
        members = {"name": names, "parameters": {"$ref": f"#/$defs/{name}"}}
        call = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
        calls.append(call)
        definitions[name] = moved(function, name)
    return calls, definitions


def _alike(functions: Sequence[Function]) -> dict[int, list[Function]]:
    """By the place of its first function, each group whose arguments have equal schemas, in equal order of members."""
    groups: dict[str, tuple[int, list[Function]]] = {}
    for place, function in enumerate(functions):
        groups.setdefault(json.dumps(arguments_schema(function)), (place, []))[1].append(function)
    return dict(groups.values())


def counted(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """What callers wrote of these functions that a grammar's size is measured by: each schema once."""
    return [arguments_schema(group[0]) for group in _alike(functions).values()]


def arguments_schema(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    return {**function.parameters, **_ANY_OBJECT} if "type" not in function.parameters else function.parameters


def moved(function: Function, name: str) -> Any:
    """The schema of a function's arguments as the definition `name` of another one; its pointers go on to hold."""
    schema = arguments_schema(function)
    base = schema.get("$id")
    own = {name: value for name, value in schema.items() if name not in ("$id", "$schema")}
    return _Move(name, base if isinstance(base, str) else "").schema(own)


class _Move:
    """Writes the pointers of one schema anew, for its new place at `#/$defs/NAME`; `base` is what it called itself."""

    def __init__(self, name: str, base: str) -> None:
        self._name = name
        self._base = base.rstrip("#")

    def schema(self, schema: Any) -> Any:
        """The same schema at its new place."""
        if isinstance(schema, list):
            return [self.schema(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        return {key: self._value(key, value) for key, value in schema.items()}

    def _value(self, key: str, value: Any) -> Any:
        if key == "$ref" and isinstance(value, str):
            return self._reference(value)
        if key == "$anchor" and isinstance(value, str):
            return self._anchor(value)
        if key in _BY_NAME and isinstance(value, dict):
            return {name: self.schema(one) for name, one in value.items()}
        return value if key in _DATA else self.schema(value)

    def _reference(self, reference: str) -> str:
        place = reference.removeprefix(self._base) if self._base else reference
        if place in ("", "#"):
            return f"#/$defs/{self._name}"
        if place.startswith("#/"):
            return f"#/$defs/{self._name}{place[1:]}"
        return f"#{self._anchor(place[1:])}" if place.startswith("#") else reference

    def _anchor(self, anchor: str) -> str:
        return f"{self._name}.{anchor}"  # two functions may have anchors of the same name
