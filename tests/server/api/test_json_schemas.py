"""The schemas of real generators are followed, and what cannot be followed is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import Enum
from typing import Any, Literal

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from longreach.api.service.grammar_check import check_grammar
from longreach.api.service.json_schema.patterns import without_look_ahead
from longreach.engine.sampling.grammar_limits import LIMITS
from longreach.util import exact_json
from pydantic import BaseModel, Field

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.schema_shapes import REFUSED, SHAPES


def follows(grammar: str, text: str) -> bool:
    """Whether a text is a whole answer by a grammar."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    tokens = [*text.encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(schema: dict[str, Any]) -> str:
    grammar, error = check_grammar("json_schema", schema)
    assert not error, error
    return grammar


@pytest.mark.parametrize("name", SHAPES)
def test_what_generators_write_is_followed(name: str) -> None:
    schema, good, bad = SHAPES[name]
    before = json.dumps(schema)
    grammar = grammar_of(schema)
    assert json.dumps(schema) == before, "the caller's schema was changed"
    assert [text for text in good if not follows(grammar, text)] == []
    assert [text for text in bad if follows(grammar, text)] == []


def test_there_are_enough_shapes_and_their_good_texts_follow_them_by_json_schema() -> None:
    assert len(SHAPES) >= 40
    judged = 0
    for name, (schema, good, _) in SHAPES.items():
        if name in ("go.nil_slices", "openapi.numbers", "net.draft4_bounds", "zod3.tuple", "zod3.object"):
            continue  # no schemas by the letter of 2020-12, or read as their authors mean them
        validator = jsonschema.Draft202012Validator(schema)
        for text in good:
            validator.validate(json.loads(text))
            judged += 1
    assert judged > 60


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_named(name: str) -> None:
    schema, message = REFUSED[name]
    _, error = check_grammar("json_schema", schema)
    assert re.search(message, error), error
    assert len(error) < 500


class Colour(Enum):
    """Some colours."""

    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    """A part of what is ordered."""

    kind: Literal["part"]
    price: Decimal
    colours: dict[Colour, int]
    parts: list[Part] = []


class Note(BaseModel):
    """Another thing."""

    kind: Literal["note"]
    text: str | None = None


class Order(BaseModel):
    """All of it."""

    item: Part | Note = Field(discriminator="kind")
    count: int = Field(1, ge=1, le=2**31)
    free: dict[str, Any] = {}


def test_a_model_of_pydantic_as_it_is_today() -> None:
    grammar = grammar_of(Order.model_json_schema())
    order = (
        '{"item": {"kind": "part", "price": 1.5, "colours": {"red": 2}, "parts": []}, "count": 3, "free": {"x": [1]}}'
    )
    Order.model_validate_json(order)
    assert follows(grammar, order)
    assert follows(grammar, '{"item": {"kind": "note", "text": null}}')
    assert not follows(grammar, '{"item": {"kind": "note", "text": null, "colours": {}}}')
    assert not follows(grammar, '{"item": {"kind": "note"}, "extra": 1}')


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^(?!ab)[a-z]*$", ["a", "", "ba", "aab"], ["ab", "abc"]),
        ("^(?!ab$)[a-z]*$", ["abc", "a"], ["ab"]),
        ("^(?!.*--)[a-z-]*$", ["a-b", "-", ""], ["a--b", "--", "---"]),
        ("^(?!.*ab)[a-z]*$", ["ba", "aa", "b"], ["ab", "aab", "xabx"]),
        (r"^(?!\d+$)\w+$", ["a1", "1a"], ["1", "123"]),
        ("^(?!.*[A-Z])(?=.*[0-9])[A-Za-z0-9]+$", ["a1", "1"], ["A1", "a"]),
    ],
)
def test_look_ahead_at_the_beginning_is_written_without(pattern: str, good: list[str], bad: list[str]) -> None:
    patterns = without_look_ahead(pattern)
    assert patterns is not None
    for text in [*good, *bad]:
        assert bool(re.search(pattern, text)) == (text in good), "the test's own texts"
        assert all(re.search(one, text) for one in patterns) == (text in good), (text, patterns)


@pytest.mark.parametrize("pattern", ["a(?!b)", "^(?!a|b)c", "^(?!a)b|c", "^(?<!a)b", "^(?!(a))b", "^(?!.*abc).*$"])
def test_other_look_around_stays(pattern: str) -> None:
    assert without_look_ahead(pattern) is None


def test_integers_are_read_as_they_are_written() -> None:
    assert exact_json.loads(b'{"a": 1234567890123456789012345, "b": "\\u00e4 9999999999999999999"}') == {
        "a": 1234567890123456789012345,
        "b": "ä 9999999999999999999",
    }
    for text in ("1" * 5000, "NaN", "[1234567890123456789012345, NaN]", '"\\ud800 1234567890123456789012345"'):
        with pytest.raises(ValueError, match=r"."):
            exact_json.loads(text)


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    """One server whose template has a place for tools."""
    with make_server(template="{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}") as server:
        yield server


def bodies(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Requests with a schema, by the path and the field that an error names."""
    named = {"name": "f", "schema": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    return {
        "/v1/chat/completions response_format": {
            **chat,
            "response_format": {"type": "json_schema", "json_schema": named},
        },
        "/v1/chat/completions tools": {**chat, "tools": [tool], "tool_choice": "required"},
        "/v1/completions response_format": {
            "prompt": "x",
            "response_format": {"type": "json_schema", "json_schema": named},
        },
        "/v1/responses text": {"input": "x", "text": {"format": {"type": "json_schema", **named}}},
    }


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [nested(40), nested(128), nested(300), {"$ref": "#"}, {"type": "str"}, {"const": 2**64 + 1}],
    ids=["40", "128", "300", "self", "type", "digits"],
)
def test_every_endpoint_refuses_what_cannot_be_followed_and_names_the_field(
    live: LiveServer, schema: dict[str, Any]
) -> None:
    for place, body in bodies(schema).items():
        path, field = place.split()
        content = json.dumps({"model": MODEL, **body})
        response = live.http.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, (place, response.text)
        error = response.json()["error"]
        assert (error["param"] or "").startswith(field), (place, error)
        assert error["type"] == "invalid_request_error"
    assert not live.engine.requests
