"""From JSON schemas to the types that msgspec decodes JSON as, so that decoding stops at the first thing that is wrong.

What a schema leaves open is `msgspec.Raw`, which is decoded later. Short lists are structs, since msgspec counts the
elements of a list only when it has made all of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import orjson

PREFIX = "#/components/schemas/"
_PLAIN = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None}
_NEVER_EMPTY = "x-never-empty"
# Of a list that may have more elements, all are made before they are counted.
_COUNTED_ELEMENTS = 512
_UNNAMEABLE = re.compile(r'[\x00-\x1f"\\]')

Schema = dict[str, Any]
Strangers = tuple[str, ...]  # names that no field has, under which null is taken, or that are skipped


def can_be_named(name: str) -> bool:
    """Whether a type may have a member of this name: msgspec writes names without escapes."""
    return _UNNAMEABLE.search(name) is None


def kind_of(first: bytes) -> str:
    """The JSON type of a text that begins with this byte; "integer" stands for every number."""
    names = {b'"': "string", b"{": "object", b"[": "array", b"t": "boolean", b"f": "boolean", b"n": "null"}
    return names.get(first, "integer")


def alternatives(schema: Schema, definitions: dict[str, Schema]) -> list[Schema] | None:
    """What a value may be, one schema for each JSON type that it may have; None where it may be any JSON."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(PREFIX)
        return alternatives(definitions[name], definitions) if name in definitions else None
    if "anyOf" in schema:
        found: list[Schema] = []
        for one in schema["anyOf"]:
            several = alternatives(one, definitions)
            if several is None:
                return None
            found += several
        return found if sum(one["type"] == "object" for one in found) < 2 else None
    if "enum" in schema and "type" not in schema:
        kinds = {kind_of(orjson.dumps(value)[:1]) for value in schema["enum"]}
        return None if kinds & {"array", "object"} else [{"type": kind} for kind in sorted(kinds)]
    kinds = schema.get("type")
    if kinds is None:
        return None
    if isinstance(kinds, list):
        return [one for kind in kinds for one in alternatives({**schema, "type": kind}, definitions) or []] or None
    if kinds == "object" and "properties" not in schema and not isinstance(schema.get("additionalProperties"), dict):
        return None
    return [schema]


def type_of(schema: Schema, definitions: dict[str, Schema], strangers: Strangers) -> Any:
    """The type that msgspec decodes a value as."""
    allowed = alternatives(schema, definitions)
    if allowed is None:
        return msgspec.Raw
    kinds = [_one_type(one, definitions, strangers) for one in allowed]
    lists = sum(one["type"] == "array" for one in allowed)
    if msgspec.Raw in kinds or lists > 1:
        return msgspec.Raw
    return functools.reduce(lambda left, right: left | right, kinds)


def member_type(schema: Schema, definitions: dict[str, Schema], strangers: Strangers) -> Any:
    """As `type_of`, for a member of a request that is of one JSON type.

    A list of a few elements is a struct, which `elements` reads: it has a field for each of them.
    """
    most = schema.get("maxItems", _COUNTED_ELEMENTS + 1)
    if schema["type"] != "array" or most > _COUNTED_ELEMENTS:
        return type_of(schema, definitions, strangers)
    kind = _element_type(schema, definitions, strangers)
    needed = schema.get("minItems", 0)
    fields = [
        (f"element{n}", kind) if n < needed else (f"element{n}", kind | msgspec.UnsetType, msgspec.UNSET)
        for n in range(most)
    ]
    return msgspec.defstruct("Elements", fields, array_like=True, forbid_unknown_fields=True, gc=False)


def elements(value: object) -> Sequence[object] | None:
    """The elements of a list, as `member_type` has it; None of anything else."""
    if isinstance(value, msgspec.Struct) and value.__struct_config__.array_like:
        found = (getattr(value, name) for name in value.__struct_fields__)
        return [element for element in found if element is not msgspec.UNSET]
    return value if isinstance(value, list) else None


def _element_type(schema: Schema, definitions: dict[str, Schema], strangers: Strangers) -> Any:
    return type_of(_never_empty(schema["items"], definitions), definitions, strangers)


def _one_type(schema: Schema, definitions: dict[str, Schema], strangers: Strangers) -> Any:
    kind = schema["type"]
    if kind == "array":
        items = _element_type(schema, definitions, strangers)
        return Annotated[list[items], msgspec.Meta(min_length=schema.get("minItems", 0))]
    if kind == "object" and "properties" in schema:
        return _struct(schema, definitions, strangers)
    if kind == "object":
        return dict[str, type_of(schema["additionalProperties"], definitions, strangers)]
    return _PLAIN[kind]


def _struct(schema: Schema, definitions: dict[str, Schema], strangers: Strangers) -> Any:
    required = set(schema.get("required", ()))
    skipped = frozenset(name for name, one in schema["properties"].items() if _is_skipped(one))
    fields, names = [], {}
    for number, (name, one) in enumerate(schema["properties"].items()):
        if name in skipped and name not in strangers:  # it would take its place in millions of objects without it
            continue
        kind = type_of(one, definitions, strangers)
        own = f"field{number}"  # a member may have a name that Python keeps for itself
        names[own] = name
        fields.append((own, kind) if name in required else (own, kind | msgspec.UnsetType, msgspec.UNSET))
    fields.sort(key=len)  # those without a default come first
    for number, name in enumerate(name for name in strangers if name not in schema["properties"]):
        names[f"stranger{number}"] = name
        fields.append((f"stranger{number}", None | msgspec.UnsetType, msgspec.UNSET))
    namespace: dict[str, Any] = {"skipped": skipped}
    if schema.get(_NEVER_EMPTY):
        namespace["__post_init__"] = _refuse_empty
    return msgspec.defstruct("Member", fields, rename=names, forbid_unknown_fields=True, gc=False, namespace=namespace)


def _is_skipped(schema: Schema) -> bool:
    """Whether a member may be anything, and is forgotten."""
    return schema.get("x-class") == "harmless" and not schema.keys() & {"type", "anyOf", "enum"}


def _never_empty(items: Schema, definitions: dict[str, Schema]) -> Schema:
    """The schema of a list's elements. Millions of empty objects are small as text, and large in memory."""
    if "$ref" in items:
        items = definitions.get(items["$ref"].removeprefix(PREFIX), items)
    bare = items.get("type") == "object" and "properties" in items and not items.get("required")
    return {**items, _NEVER_EMPTY: True} if bare else items


def _refuse_empty(member: Any) -> None:
    if all(getattr(member, name) in (msgspec.UNSET, None) for name in member.__struct_fields__):
        raise ValueError("must have a member")  # msgspec adds where
