"""Objects that name their properties have no others, as in xgrammar's strict mode, unless the schema allows them.

By JSON Schema an object is open: a weak model goes on inventing members until the context ends. A schema that is a part
of a larger one (of an `allOf`, or beside `properties`) stays open, and the larger one is closed instead.
"""

from __future__ import annotations

import copy

from longreach.api.service.json_schema.apart import overlap
from longreach.api.service.json_schema.document import (
    Document,
    Schema,
    SchemaError,
    children,
    is_schema,
    required_names,
)

_NAMING = ("properties", "patternProperties")
_OF_OBJECTS = (*_NAMING, "required", "additionalProperties", "unevaluatedProperties")
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")


class Closer:
    """Closes the objects of one document, in place."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._as_sent = Document(copy.deepcopy(document.root))
        self._seen: set[int] = set()
        self._open: dict[str, str] = {}  # of targets that are parts, where their open copies are

    def close(self) -> None:
        """Close them; a document whose references cannot be followed from its root stays as it is.

        Raises:
            SchemaError: branches of a `oneOf` overlap, or `unevaluatedProperties` cannot be followed.
        """
        if self._document.is_flat:
            self._whole(self._document.root, "#")

    def _whole(self, schema: object, pointer: str) -> None:
        """A schema that stands alone: its objects have no members but those that it names."""
        if not is_schema(schema) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        applied = [keyword for keyword in _IN_PLACE if keyword in schema]
        named = any(keyword in schema for keyword in _OF_OBJECTS)
        parts = schema.get(applied[0]) if len(applied) == 1 else None
        if len(applied) == 1 and not named and (not isinstance(parts, list) or applied != ["allOf"] or len(parts) == 1):
            self._decide(schema, pointer, closed=True)
            if "$ref" in schema:
                self._whole(self._document.pointed(schema["$ref"]), str(schema["$ref"]))
            self._children(schema, pointer, set())
        elif applied:
            self._mixed(schema, pointer)
        else:
            if any(keyword in schema for keyword in _NAMING) and "additionalProperties" not in schema:
                _close(schema)
            self._children(schema, pointer, set())

    def _children(self, schema: Schema, pointer: str, skipped: set[str]) -> None:
        for one, where in children(schema, pointer):
            if where not in skipped:
                self._whole(one, where)

    def _decide(self, schema: Schema, pointer: str, *, closed: bool) -> None:
        """Write a `oneOf` as `anyOf`."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list):
            return
        if (pair := overlap(self._as_sent, branches, closed=closed)) is not None:
            raise SchemaError(
                f"{pointer}/oneOf",
                f"branches {pair[0]} and {pair[1]} may fit the same value; use `anyOf`, or give them a `const` that "
                "tells them apart",
            )
        del schema["oneOf"]
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"anyOf": branches}]
        else:
            schema["anyOf"] = branches

    def _mixed(self, schema: Schema, pointer: str) -> None:
        """A schema of several parts, each of which stays open: the whole has the members that any part names."""
        names: dict[str, int] = {}
        known = self._gather(schema, names, set())
        if schema.get("unevaluatedProperties") is False:
            if not known or any(keyword in schema for keyword in ("anyOf", "oneOf")):
                why = "it cannot be followed beside `anyOf`, `oneOf`, or parts that allow more members"
                raise SchemaError(f"{pointer}/unevaluatedProperties", why)
            del schema["unevaluatedProperties"]
            names = {name: count for name, count in names.items() if count}  # `required` evaluates nothing
        self._part(schema, pointer, {name for name, count in names.items() if count > 1})
        if known and names and "additionalProperties" not in schema:
            own = schema.setdefault("properties", {})
            for name in names:
                own.setdefault(name, {})
            schema["additionalProperties"] = False

    def _gather(self, schema: object, names: dict[str, int], passed: set[int]) -> bool:
        """Count the members that a schema and its parts name; whether it has no others."""
        if not is_schema(schema) or id(schema) in passed:
            return True
        passed = passed | {id(schema)}
        if schema.get("additionalProperties", False) is not False or "patternProperties" in schema:
            return False
        properties = schema.get("properties")
        for name in properties if isinstance(properties, dict) else ():
            names[name] = names.get(name, 0) + 1
        for name in required_names(schema):
            names.setdefault(name, 0)
        parts = [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword) or []]
        if "$ref" in schema:
            target = self._as_sent.pointed(schema["$ref"])
            if target is None:
                return False
            parts.append(target)
        known = True
        for part in parts:  # all of them, for their names
            known = self._gather(part, names, passed) and known
        return known

    def _part(self, schema: object, pointer: str, shared: set[str]) -> None:
        """A part stays open. Members that several parts have are left alone, since they are parts themselves."""
        if not is_schema(schema):
            return
        self._seen.add(id(schema))
        self._decide(schema, pointer, closed=False)
        if isinstance(schema.get("$ref"), str):
            schema["$ref"] = self._open_copy(schema["$ref"], shared)
        parts = {f"{pointer}/{keyword}/" for keyword in ("allOf", "anyOf")}
        for one, where in [*children(schema, pointer)]:
            if where.rpartition("/")[0] + "/" in parts:
                self._part(one, where, shared)
            elif where.rpartition("/")[2] not in shared:
                self._whole(one, where)

    def _open_copy(self, ref: str, shared: set[str]) -> str:
        target = self._as_sent.pointed(ref)
        if not is_schema(target):
            return ref
        if ref not in self._open:
            definitions = self._document.root.setdefault("$defs", {})
            name = f"open {len(self._open)}"
            while name in definitions:
                name += "'"
            self._open[ref] = f"#/$defs/{name.replace(' ', '%20')}"
            definitions[name] = copy.deepcopy(target)
            self._part(definitions[name], ref, shared)
        return self._open[ref]


def _close(schema: Schema) -> None:
    if "patternProperties" not in schema:
        missing = [name for name in required_names(schema) if name not in schema["properties"]]
        schema["properties"] = {**schema["properties"], **{name: {} for name in missing}}
    schema["additionalProperties"] = False
