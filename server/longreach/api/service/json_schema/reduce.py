"""What constrains nothing is removed from a schema, and what llguidance does not know is said in its words."""

from __future__ import annotations

import json
from typing import Any

from longreach.api.service.json_schema.document import Document, Schema, SchemaError, is_schema
from longreach.api.service.json_schema.numbers import check_literals, fit_bounds
from longreach.api.service.json_schema.patterns import without_look_ahead

# A schema that nothing follows, where its place has to stay an object.
NEVER: Schema = {"enum": []}

# llguidance's; any other format is an annotation (JSON Schema validation, section 7).
FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
_ANNOTATIONS = {
    "$comment", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated",
    "description", "discriminator", "example", "examples", "externalDocs", "nullable", "readOnly", "title",
    "writeOnly", "xml",
}  # fmt: skip
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_IN_PLACE = ("$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf")
_WHOLE_NUMBERS = (
    "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties",
)  # fmt: skip


def reduce(document: Document) -> None:
    """Reduce every schema of a document, in place.

    Raises:
        SchemaError: one has a keyword that cannot be followed.
    """
    for schema, pointer in reversed([*document.schemas()]):  # inner ones first
        _drop_annotations(schema, outermost=schema is document.root)
        check_literals(schema, pointer)
        fit_bounds(schema, pointer)
        _reduce_strings(schema)
        _reduce_arrays(schema, pointer)
        _reduce_objects(document, schema, pointer)
        _reduce_applicators(schema)


def _drop_annotations(schema: Schema, outermost: bool) -> None:
    for keyword in [*schema]:
        own = keyword == "x-guidance" and outermost  # llguidance's options
        says_nothing = schema[keyword] is None and keyword != "const"  # Go's nil slices and maps
        if keyword in _ANNOTATIONS or says_nothing or (keyword.startswith("x-") and not own):
            del schema[keyword]
    for keyword in _WHOLE_NUMBERS:
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = int(value)


def _reduce_strings(schema: Schema) -> None:
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        patterns = without_look_ahead(pattern)
        if patterns is not None and len(patterns) > 1:
            schema["pattern"] = patterns[0]
            _also(schema, *({"pattern": one} for one in patterns[1:]))


def _reduce_arrays(schema: Schema, pointer: str) -> None:
    if isinstance(schema.get("items"), list):  # as before draft 2020-12
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema.pop("additionalItems")
    schema.pop("additionalItems", None)
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    if schema.get("uniqueItems") is True:
        raise SchemaError(pointer, "`uniqueItems` cannot be followed while an answer is written; leave it out")
    _reduce_contains(schema)
    if "unevaluatedItems" in schema and not any(keyword in schema for keyword in _IN_PLACE):
        rest = schema.pop("unevaluatedItems")
        schema.setdefault("items", rest)


def _reduce_contains(schema: Schema) -> None:
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
        return
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if most is None and least == 0:
        schema.pop("contains")
        schema.pop("minContains")
    elif schema["contains"] in (True, {}) and isinstance(least, int):
        schema.pop("contains")
        schema.pop("minContains", None)
        schema["minItems"] = max(schema.get("minItems", 0), least)
        if isinstance(most, int):
            schema.pop("maxContains")
            schema["maxItems"] = min(schema.get("maxItems", most), most)


def _reduce_objects(document: Document, schema: Schema, pointer: str) -> None:
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas", "patternProperties"):
        if schema.get(keyword) == {}:
            del schema[keyword]
    if "propertyNames" in schema:
        names = schema["propertyNames"]
        if is_schema(names) and [*names] == ["$ref"]:
            names = document.target(names["$ref"])
        _reduce_names(schema, names, pointer)
    if "unevaluatedProperties" in schema:
        _reduce_unevaluated(schema)


def _reduce_names(schema: Schema, names: object, pointer: str) -> None:
    """`propertyNames` as the properties that it allows, or as a pattern."""
    wanted = {**names} if is_schema(names) else names
    if is_schema(wanted):
        _drop_annotations(wanted, outermost=False)
        wanted.pop("format", None)  # of a name it is an annotation
        if wanted.get("type") == "string":
            del wanted["type"]
        if wanted.get("minLength") == 0:
            del wanted["minLength"]
    if wanted is True or wanted == {}:
        del schema["propertyNames"]
        return
    rest = schema.get("additionalProperties", True)
    if is_schema(wanted) and [*wanted] in (["enum"], ["const"]):
        allowed = wanted.get("enum", [wanted.get("const")])
        own = schema.get("properties", {})
        if isinstance(allowed, list) and isinstance(own, dict) and "patternProperties" not in schema:
            kept = {name: one for name, one in own.items() if name in allowed}
            schema["properties"] = kept | {name: rest for name in allowed if isinstance(name, str) and name not in kept}
            schema["additionalProperties"] = False
            del schema["propertyNames"]
            return
    pattern = _name_pattern(wanted)
    if pattern is not None and not schema.get("properties") and "patternProperties" not in schema:
        schema["patternProperties"] = {pattern: rest}
        schema["additionalProperties"] = False
        del schema["propertyNames"]
        return
    raise SchemaError(
        f"{pointer}/propertyNames",
        "names can be limited by one `enum`, `pattern`, or `minLength` and `maxLength`, beside no `properties`",
    )


def _name_pattern(names: object) -> str | None:
    if not is_schema(names):
        return None
    if [*names] == ["pattern"] and isinstance(names["pattern"], str):
        return names["pattern"]
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    lengths = all(isinstance(value, int) for value in names.values())
    return rf"^[\s\S]{{{least},{most}}}$" if lengths and {*names} <= {"minLength", "maxLength"} else None


def _reduce_unevaluated(schema: Schema) -> None:
    """`unevaluatedProperties` as `additionalProperties`, where they are the same. `close` looks at the others."""
    rest = schema["unevaluatedProperties"]
    if rest in (True, {}):
        del schema["unevaluatedProperties"]
        schema.setdefault("additionalProperties", True)
    elif not any(keyword in schema for keyword in _IN_PLACE):
        del schema["unevaluatedProperties"]
        schema.setdefault("additionalProperties", rest)


def _reduce_applicators(schema: Schema) -> None:
    if "then" not in schema and "else" not in schema:
        schema.pop("if", None)
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    if schema.get("allOf") == []:
        del schema["allOf"]
    if "not" in schema:
        _reduce_not(schema, schema["not"])
    if "oneOf" in schema and _are_all_numbers(schema["oneOf"]):
        schema["oneOf"] = [{"type": "number"}]
    if isinstance(schema.get("oneOf"), list) and len(schema["oneOf"]) == 1:
        [only] = schema.pop("oneOf")
        _also(schema, only)


def _reduce_not(schema: Schema, unwanted: object) -> None:
    if unwanted is False or unwanted == NEVER:
        del schema["not"]
    elif unwanted is True or unwanted == {}:
        schema.clear()
        schema.update(json.loads(json.dumps(NEVER)))
    elif is_schema(unwanted) and [*unwanted] == ["type"]:
        refused = unwanted["type"] if isinstance(unwanted["type"], list) else [unwanted["type"]]
        own: Any = schema.get("type", [one for one in _TYPES if one != "integer"])
        types = [one for one in (own if isinstance(own, list) else [own]) if one not in refused]
        if "number" in refused:
            types = [one for one in types if one != "integer"]
        elif "integer" in refused and "number" in types:
            return  # numbers with a fraction: llguidance refuses the `not`
        del schema["not"]
        schema["type"] = types
        if not types:
            schema.clear()
            schema.update(json.loads(json.dumps(NEVER)))


def _are_all_numbers(branches: object) -> bool:
    """Whether branches are the bare types integer and number, which generators write for numbers of any kind."""
    if not isinstance(branches, list):
        return False
    return {"type": "number"} in branches and all(one in ({"type": "integer"}, {"type": "number"}) for one in branches)


def _also(schema: Schema, *more: object) -> None:
    """Let a schema demand more."""
    schema["allOf"] = [*schema.get("allOf", []), *more]
