"""JSON schemas as generators write them, with texts that follow them and texts that do not.

The shapes are those of pydantic 1 and 2, zod 3 (zod-to-json-schema) and 4, Go (invopop, kin-openapi), .NET, OpenAPI's
generators, TypeBox, MCP servers, and of tools written by hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A schema, JSON texts that a grammar must allow, and texts that it must not."""

    schema: dict[str, Any]
    good: list[str]
    bad: list[str]


def member(schema: dict[str, Any], good: list[str], bad: list[str]) -> Shape:
    """A shape of an object's only member."""
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return Shape(whole, [f'{{"a": {text}}}' for text in good], [f'{{"a": {text}}}' for text in bad])


ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"

SHAPES: dict[str, Shape] = {
    # pydantic 2
    "pydantic.password": member({"type": "string", "format": "password", "writeOnly": True}, ['"x"'], ["1"]),
    "pydantic.binary": member({"type": "string", "format": "binary"}, ['"x"'], ["1"]),
    "pydantic.path": member({"type": "string", "format": "path"}, ['"/a"'], ["1"]),
    "pydantic.uuid": member(
        {"type": "string", "format": "uuid"}, ['"00000000-0000-4000-8000-000000000000"'], ['"00000000"']
    ),
    "pydantic.uuid4": member({"type": "string", "format": "uuid4"}, ['"x"'], ["1"]),
    "pydantic.base64": member({"type": "string", "format": "base64"}, ['"eA=="'], ["1"]),
    "pydantic.network": member({"type": "string", "format": "ipv4network"}, ['"10.0.0.0/8"'], ["1"]),
    "pydantic.json": member(
        {"type": "string", "contentMediaType": "application/json", "contentSchema": {}}, ['"1"'], ["1"]
    ),
    "pydantic.set": member(
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, ["[1, 1]"], ["[0.5]"]
    ),
    "pydantic.optional": member(
        {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "A"}, ["1", "null"], ['"1"']
    ),
    "pydantic.tuple": member(
        {"type": "array", "minItems": 2, "maxItems": 2, "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        ['[1, "a"]'],
        ["[1]", '["a", 1]'],
    ),
    "pydantic.dict": member(
        {"type": "object", "additionalProperties": {"type": "integer"}}, ['{"k": 1}'], ['{"k": "v"}']
    ),
    "pydantic.any_dict": member({"type": "object", "additionalProperties": True}, ['{"k": [1]}', "{}"], ["1"]),
    "pydantic.enum_keys": Shape(
        {
            "$defs": {"E": {"enum": ["x", "y"], "title": "E", "type": "string"}},
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "propertyNames": {"$ref": "#/$defs/E"},
        },
        ['{"x": 1}', '{"x": 1, "y": 2}', "{}"],
        ['{"z": 1}', '{"x": "1"}'],
    ),
    "pydantic.pattern_keys": member(
        {"type": "object", "patternProperties": {"^k": {"type": "integer"}}}, ['{"k1": 1}'], ['{"a": 1}', '{"k1": "v"}']
    ),
    "pydantic.decimal": member(
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        ["1.5", '"1.5"', '"-.5"'],
        ['"-."', '""', '"x"'],
    ),
    "pydantic.union": Shape(
        {
            "$defs": {
                "Cat": {
                    "properties": {"kind": {"const": "cat", "title": "Kind"}, "lives": {"type": "integer"}},
                    "required": ["kind", "lives"],
                    "title": "Cat",
                    "type": "object",
                },
                "Dog": {"properties": {"kind": {"const": "dog"}}, "required": ["kind"], "type": "object"},
            },
            "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        },
        ['{"kind": "cat", "lives": 9}', '{"kind": "dog"}'],
        ['{"kind": "dog", "lives": 9}', '{"kind": "cow"}'],
    ),
    "pydantic.recursive": Shape(
        {
            "$defs": {
                "Node": {
                    "properties": {
                        "value": {"type": "integer"},
                        "children": {"default": [], "items": {"$ref": "#/$defs/Node"}, "type": "array"},
                    },
                    "required": ["value"],
                    "type": "object",
                }
            },
            "$ref": "#/$defs/Node",
        },
        ['{"value": 1, "children": [{"value": 2}]}'],
        ['{"value": 1, "children": [{"value": 2, "more": 1}]}'],
    ),
    "pydantic.number_bounds": member(
        {"type": "number", "exclusiveMaximum": 1.5, "minimum": 0}, ["0", "1.25"], ["1.5", "-1"]
    ),
    "pydantic.alias_named_format": Shape(
        {
            "properties": {
                "format": {"type": "string", "title": "Format"},
                "title": {"const": {"title": "x", "format": "y"}},
            },
            "required": ["format", "title"],
            "type": "object",
        },
        ['{"format": "any", "title": {"title": "x", "format": "y"}}'],
        ['{"format": 1, "title": {}}', '{"format": "any", "title": {}}'],
    ),
    "pydantic1.all_of": Shape(
        {
            "title": "M",
            "type": "object",
            "properties": {"b": {"title": "B", "description": "d", "allOf": [{"$ref": "#/definitions/B"}]}},
            "required": ["b"],
            "definitions": {"B": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
        },
        ['{"b": {"x": 1}}'],
        ['{"b": {"x": 1, "y": 2}}', '{"b": {}}'],
    ),
    # zod 3 and 4
    "zod4.record": Shape(
        {
            "$schema": DRAFT_2020,
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"},
        },
        ['{"k": 1.5}', "{}"],
        ['{"k": "v"}'],
    ),
    "zod4.enum_record": Shape(
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "string"},
            "required": ["a", "b"],
        },
        ['{"a": "x", "b": "y"}'],
        ['{"a": "x"}', '{"a": "x", "b": "y", "c": "z"}'],
    ),
    "zod4.partial_record": Shape(
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {}},
        ['{"b": 1}'],
        ['{"c": 1}'],
    ),
    "zod4.min_key": member(
        {"type": "object", "propertyNames": {"type": "string", "minLength": 1}, "additionalProperties": {}},
        ['{"k": 1}'],
        ['{"": 1}'],
    ),
    "zod4.pattern_key": member(
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^id_"}, "additionalProperties": {}},
        ['{"id_1": 1}'],
        ['{"k": 1}'],
    ),
    "zod4.never": Shape(
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"not": {}}}, "required": ["a"]},
        ['{"a": "x"}'],
        ['{"a": "x", "b": 1}'],
    ),
    "zod4.strict": Shape(
        {
            "$schema": DRAFT_2020,
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}},
            "required": ["n"],
            "additionalProperties": False,
        },
        ['{"n": 9007199254740991}', '{"n": -5}'],
        ['{"n": 9007199254740992}', '{"n": 0.5}'],
    ),
    "zod4.email": member(
        {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
        ['"a.b@c.de"'],
        ['".b@c.de"', '"a..b@c.de"', '"a"'],
    ),
    "zod4.datetime": member(
        {"type": "string", "format": "date-time", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
        ['"2026-01-02T03:04:05Z"'],
        ['"2026-01-02T03:04:05+01:00"', '"2026-13-02T03:04:05Z"'],
    ),
    "zod4.tuple": member(
        {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "number"}},
        ['["a", 1]'],
        ['["a", "b"]'],
    ),
    "zod3.literal_union": member({"type": ["string", "number", "null"]}, ['"a"', "1.5", "null"], ["true"]),
    "zod3.nullable": member(
        {"anyOf": [{"anyOf": [{"not": {}}, {"type": "string"}]}, {"type": "null"}]}, ['"a"', "null"], ["1"]
    ),
    "zod3.tuple": member(
        {"type": "array", "minItems": 1, "maxItems": 1, "items": [{"type": "string"}]}, ['["a"]'], ['["a", 1]', "[1]"]
    ),
    "zod3.object": Shape(
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        ['{"a": "x", "b": "y"}'],
        ['{"a": "x", "b": 1}'],
    ),
    "zod3.int_keys": Shape(
        {"$schema": DRAFT_7, "type": "array", "items": {"type": "string"}, "uniqueItems": False},
        ['["a", "a"]'],
        ["[1]"],
    ),
    # Go
    "go.int64": member(
        {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
        [str(2**63 - 1), "-5"],
        ["0.5", str(2**63)],
    ),
    "go.uint64": member(
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**63 - 1)], ["-1", str(2**64)]
    ),
    "go.nil_slices": Shape(
        {"type": "object", "properties": {"a": {"type": "string", "enum": None}}, "required": None, "$defs": None},
        ["{}", '{"a": "x"}'],
        ['{"a": 1}', '{"b": 1}'],
    ),
    "go.invopop": Shape(
        {
            "$schema": DRAFT_2020,
            "$id": "https://example.com/tool",
            "$ref": "#/$defs/Args",
            "$defs": {
                "Args": {
                    "properties": {"path": {"type": "string"}, "when": {"type": "string", "format": "date-time"}},
                    "additionalProperties": False,
                    "type": "object",
                    "required": ["path"],
                }
            },
        },
        ['{"path": "x"}'],
        ['{"path": "x", "mode": 1}', '{"path": "x", "when": "now"}'],
    ),
    "go.time_duration": member({"type": "integer", "format": "duration"}, ["5"], ['"5s"']),
    # .NET
    "net.enum": member({"enum": ["Red", "Green"], "type": ["string", "null"]}, ['"Red"'], ['"Blue"']),
    "net.range": member({"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308}, ["0", "5.5"], ["-1"]),
    "net.decimal": member(
        {"type": "number", "minimum": -7.9228162514264338e28, "maximum": 7.9228162514264338e28},
        ["1.5", "-1.5"],
        ['"1"'],
    ),
    "net.draft4_bounds": member(
        {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 9}, ["1", "9"], ["0", "10"]
    ),
    "net.timespan": member({"type": "string", "format": "time-span"}, ['"00:00:01"'], ["1"]),
    "net.inheritance": Shape(
        {
            "type": "object",
            "properties": {
                "shape": {
                    "allOf": [
                        {"$ref": "#/definitions/Base"},
                        {"type": "object", "properties": {"r": {"type": "number"}}},
                    ]
                }
            },
            "required": ["shape"],
            "definitions": {
                "Base": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
            },
        },
        ['{"shape": {"name": "c", "r": 1.5}}'],
        ['{"shape": {"name": "c", "r": 1.5, "q": 1}}', '{"shape": {"r": 1.5}}'],
    ),
    # OpenAPI
    "openapi.components": Shape(
        {
            "type": "object",
            "properties": {"pet": {"$ref": "#/components/schemas/Pet"}},
            "components": {
                "schemas": {
                    "Pet": {
                        "type": "object",
                        "properties": {"c": {"type": "string", "format": "color"}},
                        "xml": {"name": "pet"},
                        "example": {},
                    }
                }
            },
        },
        ['{"pet": {"c": "red"}}'],
        ['{"pet": {"d": 1}}'],
    ),
    "openapi.nullable": member(
        {"type": "string", "nullable": True, "x-go-name": "A", "externalDocs": {"url": "x"}}, ['"a"'], ["1"]
    ),
    "openapi.int32": member(
        {"type": "integer", "format": "int32", "minimum": -(2**31), "maximum": 2**31 - 1},
        ["-2147483648"],
        ["2147483648"],
    ),
    "openapi.numbers": member(
        {"oneOf": [{"type": "integer", "format": "int64"}, {"type": "number", "format": "double"}]},
        ["1", "1.5"],
        ['"1"'],
    ),
    "openapi.pets": Shape(
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "$defs": {
                "Cat": {"type": "object", "properties": {"meow": {"type": "boolean"}}, "required": ["meow"]},
                "Dog": {"type": "object", "properties": {"bark": {"type": "boolean"}}, "required": ["bark"]},
            },
        },
        ['{"meow": true}', '{"bark": true}'],
        ['{"meow": true, "bark": true}', "{}"],
    ),
    "openapi.nullable_ref": member(
        {"oneOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"type": "string", "readOnly": True}}}]},
        ["null", '{"x": "y"}'],
        ['{"z": 1}'],
    ),
    "openapi.unevaluated": Shape(
        {
            "allOf": [{"$ref": "#/$defs/Base"}],
            "type": "object",
            "properties": {"b": {"type": "integer"}},
            "unevaluatedProperties": False,
            "$defs": {"Base": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        },
        ['{"a": 1}', '{"a": 1, "b": 2}'],
        ['{"a": 1, "c": 2}', '{"b": 2}'],
    ),
    # TypeBox, MCP, and by hand
    "typebox.record": Shape(
        {"type": "object", "patternProperties": {"^(.*)$": {"type": "number"}}}, ['{"k": 1}'], ['{"k": "v"}']
    ),
    "typebox.literals": member(
        {"anyOf": [{"const": "a", "type": "string"}, {"const": "b", "type": "string"}]}, ['"a"'], ['"c"']
    ),
    "mcp.no_arguments": Shape({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
    "mcp.free_arguments": Shape({"type": "object"}, ["{}", '{"a": 1}'], ["1"]),
    "mcp.any_of_required": Shape(
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "url": {"type": "string"}},
            "anyOf": [{"required": ["path"]}, {"required": ["url"]}],
        },
        ['{"path": "x"}', '{"url": "y"}'],
        ["{}", '{"path": "x", "more": 1}'],
    ),
    "hand.open": Shape(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        ['{"a": 1, "b": [2]}'],
        ['{"a": "x"}'],
    ),
    "hand.required_elsewhere": Shape(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
        ['{"a": 1, "b": [2]}'],
        ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}'],
    ),
    "hand.contains": member(
        {"type": "array", "items": {"type": "integer"}, "contains": {}, "minContains": 0}, ["[]"], ['["a"]']
    ),
    "hand.not_null": member({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"'], ["null"]),
    "hand.ecma_password": member(
        {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d).{3,}$"}, ['"aB1"'], ['"ab1"', '"B1"']
    ),
    "hand.reserved_name": member({"type": "string", "pattern": "^(?!con$)[a-z]+$"}, ['"cond"', '"co"'], ['"con"']),
    "hand.exact_big": member({"enum": [2**60, 7]}, [str(2**60), "7"], [str(2**60 + 1)]),
    "hand.float_counts": member(
        {"type": "array", "minItems": 1.0, "maxItems": 2.0, "uniqueItems": False}, ["[1]"], ["[]"]
    ),
    "hand.if_alone": member({"type": "string", "if": {"const": "x"}, "dependentRequired": {}}, ['"y"'], ["1"]),
    "hand.key_twice": Shape(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1, "a": 2}', '{"b": 1, "b": 1}'],
    ),
}

# What no grammar can follow exactly, and what the refusal says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "const": (
        {"const": 1234567890123456789},
        r"at `#/const`: the integer 1234567890123456789 cannot be written exactly",
    ),
    "nested_enum": (
        {"type": "object", "properties": {"id": {"enum": [1, [2**64]]}}},
        r"at `#/properties/id/enum/1/0`: the integer 18446744073709551616 cannot",
    ),
    "bound": (
        {"type": "integer", "minimum": 2**53 + 1},
        r"at `#/minimum`: the bound 9007199254740993 cannot be followed",
    ),
    "exclusive": ({"type": "integer", "exclusiveMinimum": 2**53}, r"at `#/minimum`: the bound 9007199254740993 cannot"),
    "unique": ({"type": "array", "uniqueItems": True}, r"at `#`: `uniqueItems` cannot be followed"),
    "one_of": (
        {"oneOf": [{"type": "string"}, {"minLength": 2}]},
        r"at `#/oneOf`: branches 0 and 1 may fit the same value",
    ),
    "names": (
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^b"}},
        r"at `#/propertyNames`: names can be limited by",
    ),
    "unevaluated": (
        {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": False},
        r"at `#/unevaluatedProperties`: it cannot be followed beside `anyOf`",
    ),
    "required_is_not_evaluated": (
        {"type": "object", "allOf": [{"properties": {"a": {}}}, {"required": ["b"]}], "unevaluatedProperties": False},
        r"[Uu]nsatisfiable",
    ),
    "self": ({"$ref": "#"}, r"it has no end: `#` -> `#` always leads back"),
    "cycle": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        r"it has no end: `#/\$defs/a` -> `#/\$defs/b` -> `#/\$defs/a` always leads back",
    ),
    "endless_member": (
        {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/n"}},
            "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
        },
        r"at `#/.*`: it has no end: `#/\$defs/n` -> `#/\$defs/n` always",
    ),
    "type": (
        {"type": "object", "properties": {"a": {"type": "str"}}},
        r"at `#/properties/a/type`: there is no type 'str'",
    ),
    "required": (
        {"type": "object", "properties": {"a": {"required": True}}},
        r"at `#/properties/a/required`: it must be a list",
    ),
    "properties": ({"type": "object", "properties": ["a"]}, r"at `#/properties`: it must be an object"),
    "schemas": ({"anyOf": [{"type": "string"}, "integer"]}, r"at `#/anyOf`: it must hold schemas"),
    "true_bound": ({"type": "integer", "minimum": True}, r"at `#/minimum`: it must be a number"),
    "look_behind": ({"type": "string", "pattern": "(?<=a)b"}, r"look-around"),
    "conditional": ({"if": {"type": "string"}, "then": {"minLength": 2}}, r"Unimplemented keys"),
    "remote": ({"$ref": "https://example.com/schema"}, r"."),
}
