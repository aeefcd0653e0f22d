"""Where schemas stand within a JSON schema, and what its references point at."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from typing import Any, TypeGuard

Schema = dict[str, Any]

# Keywords whose value is a schema, a list of schemas, and an object of schemas.
_ONE = (
    "items", "additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LIST = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAP = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


class SchemaError(Exception):
    """A schema that cannot be followed; `where` is a JSON pointer (RFC 6901) into it."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"at `{where[:200]}`: {why}")
        self.where = where
        self.why = why


def is_schema(value: object) -> TypeGuard[Schema]:
    """Whether a value is a schema with keywords: an object, and neither true nor false."""
    return isinstance(value, dict)


def children(schema: Schema, pointer: str) -> Iterator[tuple[object, str]]:
    """The schemas one level down and their pointers. What `const`, `enum` and `default` hold is no schema."""
    for keyword in _ONE:
        if keyword in schema and not isinstance(schema[keyword], list):
            yield schema[keyword], f"{pointer}/{keyword}"
    for keyword in _LIST:
        if isinstance(schema.get(keyword), list):
            for index, one in enumerate(schema[keyword]):
                yield one, f"{pointer}/{keyword}/{index}"
    for keyword in _MAP:
        if isinstance(schema.get(keyword), dict):
            for name, one in [*schema[keyword].items()]:  # `close` adds definitions meanwhile
                yield one, f"{pointer}/{keyword}/{escaped(name)}"


def escaped(name: str) -> str:
    """A member's name within a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


class Document:
    """One schema with everything that its references reach.

    Attributes:
        root: the schema.
        is_flat: no schema within it has an `$id`, so that every `#/...` starts at the root.
    """

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.is_flat = not any(
            schema is not root and any(isinstance(schema.get(name), str) for name in ("$id", "id"))
            for schema, _ in self.schemas()
        )

    def schemas(self) -> Iterator[tuple[Schema, str]]:
        """Every schema with keywords and its pointer, outer ones first; also those that only a reference reaches, as in
        OpenAPI's `components`."""
        seen: set[int] = set()
        waiting: list[tuple[object, str]] = [(self.root, "#")]
        while waiting:
            schema, pointer = waiting.pop()
            if not is_schema(schema) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema, pointer
            waiting += reversed([*children(schema, pointer)])
            if isinstance(ref := schema.get("$ref"), str):
                waiting.insert(0, (self.pointed(ref), ref))

    def pointed(self, ref: object) -> object:
        """What a reference of the form `#/...` points at; None for one that has another form or leads nowhere."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            return None
        value: Any = self.root
        for part in urllib.parse.unquote(ref[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isascii() and name.isdigit() and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
        return value

    def target(self, ref: object) -> object:
        """What a reference leads to, behind references that stand alone; None where that is not known."""
        for _ in range(64):
            found = self.pointed(ref) if self.is_flat else None
            if not is_schema(found) or [*found] != ["$ref"]:
                return found
            ref = found["$ref"]
        return None


def required_names(schema: Schema) -> list[str]:
    """The names under `required`, as far as they are names."""
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
