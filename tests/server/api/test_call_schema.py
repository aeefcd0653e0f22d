"""Parameters of functions mean the same in the grammar of forced calls as they do by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from longreach.api.generation.call_schema import call_schema
from longreach.api.schema.requests.formats import Function
from longreach.api.service.grammar_check import check_grammar


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether a text is a sentence of a schema's grammar."""
    grammar, error = check_grammar("json_schema", schema)
    assert not error
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def of(**more: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, **more}


NODE = of(properties={"v": {"type": "integer"}, "next": {"$ref": "#/$defs/T"}}, required=["v"])
FUNCTIONS = {
    "tree": of(properties={"t": {"$ref": "#/$defs/T"}}, **{"$defs": {"T": NODE}}),
    "text": of(properties={"t": {"$ref": "#/$defs/T"}}, **{"$defs": {"T": {"type": "string"}}}),
    "older": of(properties={"t": {"$ref": "#/definitions/T"}}, definitions={"T": {"type": "boolean"}}),
    "itself": of(properties={"t": {"$ref": "#"}, "x": {"enum": ["#/$defs/T"]}}),
    "sibling": of(properties={"t": {"anyOf": [{"type": "null"}]}, "x": {"$ref": "#/properties/t/anyOf/0"}}),
    "anchored": of(properties={"t": {"$ref": "#a"}}, **{"$defs": {"T": {"$anchor": "a", "type": "null"}}}),
    "anchored_too": of(properties={"t": {"$ref": "#a"}}, **{"$defs": {"T": {"$anchor": "a", "type": "string"}}}),
    "with_id": of(
        properties={"t": {"$ref": "https://x.example/y#/$defs/T"}, "const": {"$ref": "#/$defs/T"}},
        **{
            "$id": "https://x.example/y",
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$defs": {"T": {"const": 7}},
        },
    ),
    "untyped": {"properties": {"t": {"type": "null"}}, "additionalProperties": False},
    "none": {},
}
ARGUMENTS = [
    ("tree", '{"t": {"v": 1, "next": {"v": 2}}}', True),
    ("tree", '{"t": "x"}', False),
    ("text", '{"t": "x"}', True),
    ("text", '{"t": {"v": 1}}', False),
    ("older", '{"t": true}', True),
    ("older", '{"t": "x"}', False),
    ("itself", '{"t": {"t": {}, "x": "#/$defs/T"}}', True),
    ("itself", '{"t": {"v": {}}}', False),
    ("sibling", '{"t": null, "x": null}', True),
    ("sibling", '{"x": 1}', False),
    ("anchored", '{"t": null}', True),
    ("anchored_too", '{"t": null}', False),
    ("anchored_too", '{"t": "x"}', True),
    ("with_id", '{"t": 7, "const": 7}', True),
    ("with_id", '{"t": 8}', False),
    ("untyped", '{"t": null}', True),
    ("untyped", "[]", False),
    ("none", "{}", True),
    ("none", "7", False),
]


@pytest.mark.parametrize(("name", "arguments", "right"), ARGUMENTS)
def test_parameters_mean_the_same_alone_and_among_others(name: str, arguments: str, right: bool) -> None:
    functions = [Function(name=name, parameters=schema) for name, schema in FUNCTIONS.items()]
    [function] = [one for one in functions if one.name == name]
    assert takes(call_schema([function], named=True, parallel=True), arguments) == right
    call = f'{{"name": "{name}", "parameters": {arguments}}}'
    assert takes(call_schema(functions, named=False, parallel=True), f"[{call}, {call}]") == right


def test_how_many_calls_a_list_has() -> None:
    function = Function(name="f", parameters={"type": "object", "additionalProperties": False})
    call = '{"name": "f", "parameters": {}}'
    for parallel in (True, False):
        schema = call_schema([function], named=False, parallel=parallel)
        assert [takes(schema, f"[{', '.join([call] * count)}]") for count in range(3)] == [False, True, parallel]
