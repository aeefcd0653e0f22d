"""The parameters of a function as a grammar writes them in tags, without quotes.

A text in tags has no quotes that say where it ends, so a grammar knows nothing of it but the tag behind it: it can be
any text, or one of some. Values that are no strings are JSON, and follow their schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from longreach.api.service.json_schema.document import SchemaError, escaped
from longreach.api.service.json_schema.reduce import FORMATS
from longreach.text.calls.values import alternatives, target, types_of

# What constrains an object beyond its properties.
_OF_OBJECTS = (
    "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "minProperties", "maxProperties", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies",
)  # fmt: skip
_OF_TEXTS = ("pattern", "maxLength")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf")
_SCALARS = {"string", "null", "boolean", "integer", "number"}
_WORDS = {"null": ("null",), "boolean": ("true", "false")}
_CURE = "no grammar can follow it in this model's format of calls; leave out `strict`"


class AsJson:
    """A value that is JSON."""


def properties_of(parameters: Mapping[str, Any]) -> dict[str, tuple[Any, bool]] | None:
    """The schemas of a function's parameters, and whether a call has to have each; None if it may have any.

    Raises:
        SchemaError: more is asked of them than a grammar of tags can say.
    """
    schema: Any = parameters
    for _ in range(64):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
            break
        schema = target(schema["$ref"], parameters)
    if not isinstance(schema, dict):
        raise SchemaError("#", f"the object is not known: {_CURE}")
    if beyond := [name for name in _OF_OBJECTS if schema.get(name) not in (None, [], {})]:
        raise SchemaError(f"#/{beyond[0]}", _CURE)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    others = schema.get("additionalProperties")
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise SchemaError("#", "`properties` must be an object and `required` a list")
    if not properties and not required and others is not False:
        if others not in (None, True, {}):
            raise SchemaError("#/additionalProperties", _CURE)
        return None
    names = dict.fromkeys([*properties, *(name for name in required if isinstance(name, str))])
    if wrong := [name for name in names if not name or any(one in name for one in "<>\n")]:
        raise SchemaError(f"#/properties/{escaped(wrong[0])}", f"of a name with such characters {_CURE}")
    found = {name: (properties.get(name, {}), name in required) for name in names}
    return {name: one for name, one in found.items() if one[0] is not False}


def value_of(schema: Any, root: Mapping[str, Any], closing: str) -> type[AsJson] | tuple[str, ...] | None:
    """What stands in a parameter's tags: JSON, one of some texts, or any text.

    Arguments:
        root: the schema that `schema` stands in.
        closing: the tag behind it.

    Raises:
        SchemaError: a grammar cannot say it; its place is that within `schema`.
    """
    kinds = types_of(schema, root)
    if "string" not in kinds:
        return AsJson
    if not isinstance(schema, dict):
        return None
    texts: list[str] = []
    named: list[Any] = []
    free: set[str] = set()
    for one in alternatives(schema, root):
        if any(key in one for key in ("not", "if")) or len(one.get("allOf") or ()) > 1:
            raise SchemaError("", _CURE)
        values = one.get("enum", [one["const"]] if "const" in one else None)
        if isinstance(values, list):
            texts += map(_text, values)
            named += values
        elif not any(key in one for key in _COMBINED):
            free |= _free(one)
        elif beyond := [name for name in (*_OF_TEXTS, *_OF_NUMBERS, "minLength", "format") if name in one]:
            raise SchemaError(f"/{beyond[0]}", _CURE)
    if not texts or (free == {"string"} and all(isinstance(one, str) for one in named)):
        return None
    if free - _WORDS.keys():
        raise SchemaError("", _CURE)
    texts += [word for kind in sorted(free) for word in _WORDS[kind]]
    if any(closing in text or text != text.strip("\n") for text in texts):
        raise SchemaError("", _CURE)
    return tuple(dict.fromkeys(texts))


def _text(value: Any) -> str:
    if isinstance(value, dict | list):
        raise SchemaError("/enum", _CURE)
    return value if isinstance(value, str) else json.dumps(value)


def _free(schema: Mapping[str, Any]) -> set[str]:
    """The types of values that a schema without values says nothing more of."""
    kinds = {*types_of(schema, {})}
    beyond = [*_OF_TEXTS, *(["minLength"] if schema.get("minLength") else [])]
    beyond += _OF_NUMBERS if kinds & {"integer", "number"} else []
    beyond += ["format"] if schema.get("format") in FORMATS else []
    beyond += [*_OF_OBJECTS, "properties", "required", "items", "prefixItems"] if not schema.get("type") else []
    if found := [name for name in beyond if schema.get(name) is not None]:
        raise SchemaError(f"/{found[0]}", _CURE)
    if not schema.get("type"):
        return {"string"}
    if kinds - _SCALARS:
        raise SchemaError("/type", _CURE)
    return kinds
