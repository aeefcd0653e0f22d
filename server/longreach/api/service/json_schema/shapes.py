"""Keywords have values of the types that JSON Schema gives them, or the schema is refused by name."""

from __future__ import annotations

from typing import Any

from longreach.api.service.json_schema.document import Document, SchemaError

_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"), (dict,)),
    **dict.fromkeys(("allOf", "anyOf", "enum", "oneOf", "prefixItems", "required"), (list,)),
    **dict.fromkeys(("$ref", "pattern"), (str,)),
    **dict.fromkeys(("additionalItems", "additionalProperties", "contains", "else", "if", "not"), (dict, bool)),
    **dict.fromkeys(("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"), (dict, bool)),
    **dict.fromkeys(("maxContains", "maxItems", "maxLength", "maxProperties", "maximum"), (int, float)),
    **dict.fromkeys(("minContains", "minItems", "minLength", "minProperties", "minimum"), (int, float)),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), (int, float, bool)),
    "items": (dict, bool, list),
    "multipleOf": (int, float),
    "type": (str, list),
    "uniqueItems": (bool,),
}
_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", float: "a number"}
_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")


def check_shapes(document: Document) -> None:
    """Check what every schema of a document holds. A keyword that is null is as good as absent.

    Raises:
        SchemaError: a value has another type.
    """
    for schema, pointer in document.schemas():
        for keyword, kinds in _KINDS.items():
            value = schema.get(keyword)
            if value is not None and (not isinstance(value, kinds) or (value in (True, False) and _odd(value, kinds))):
                wanted = " or ".join(_NAMES[kind] for kind in kinds if kind in _NAMES)
                raise SchemaError(f"{pointer}/{keyword}", f"it must be {wanted}")
        _check_schemas(schema, pointer)
        types = schema.get("type")
        for name in [types] if isinstance(types, str) else types or []:
            if not isinstance(name, str) or name not in _TYPES:
                raise SchemaError(f"{pointer}/type", f"there is no type {str(name)[:64]!r}")
        if not all(isinstance(name, str) for name in schema.get("required") or []):
            raise SchemaError(f"{pointer}/required", "it must be a list of strings")


def _odd(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value is true or false, which Python counts among the integers, and must not be."""
    return isinstance(value, bool) and bool not in kinds


def _check_schemas(schema: dict[str, Any], pointer: str) -> None:
    held = [(f"{pointer}/{keyword}", one) for keyword in _SCHEMA_LISTS for one in schema.get(keyword) or []]
    held += [(f"{pointer}/{keyword}", one) for keyword in _SCHEMAS for one in (schema.get(keyword) or {}).values()]
    if isinstance(schema.get("items"), list):
        held += [(f"{pointer}/items", one) for one in schema["items"]]
    for where, one in held:
        if not isinstance(one, dict | bool):
            raise SchemaError(where, "it must hold schemas: objects, true or false")
