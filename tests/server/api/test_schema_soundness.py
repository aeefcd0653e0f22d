"""Drawn schemas: what their grammars allow follows them by JSON Schema, and nothing breaks what prepares them."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from longreach.api.service.grammar_check import check_grammar
from longreach.api.service.json_schema.document import SchemaError
from longreach.api.service.json_schema.prepare import prepared
from longreach.api.service.json_schema.shapes import _KINDS
from longreach.engine.sampling.grammar_limits import LIMITS

_VOCABULARY = LLTokenizer("byte")
_LONG = 400  # bytes of an answer that has no end of its own
_NAMES = "abc"
_LEAVES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0, "exclusiveMaximum": 9},
    {"type": "string", "maxLength": 3, "format": "any"},
    {"type": "null"},
    {"const": "a"},
    {"enum": ["b", 1, None]},
    {"type": "string", "pattern": "^(?!a)[a-c]{0,2}$"},
    {"type": "number", "minimum": -1},
    {"not": {}},
    {"type": ["string", "null"], "not": {"type": "null"}},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": False},
    *({"$ref": f"#/$defs/{name}"} for name in "xyz"),
]


class Drawn:
    """Draws schemas, and answers that their grammars allow."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def document(self) -> dict[str, Any]:
        """A schema with definitions."""
        schema = {"anyOf": [self.schema(3)]}
        return schema | {"$defs": {name: self.schema(1) for name in "xyz"}}

    def schema(self, depth: int) -> dict[str, Any]:
        """A schema of so many levels."""
        draw = self._random
        kind = draw.random() if depth else 0.0
        if kind < 0.3:
            return dict(draw.choice(_LEAVES))
        if kind < 0.6:
            return self.object(depth)
        if kind < 0.8:
            return {draw.choice(["anyOf", "oneOf"]): [self.schema(depth - 1), self.schema(depth - 1)]}
        if kind < 0.9:
            return {"allOf": [dict(_LEAVES[-1]), self.object(depth - 1)]}
        parts = [self.object(depth - 1), self.object(depth - 1)]
        return self.object(depth) | {draw.choice(["anyOf", "allOf", "oneOf"]): parts}

    def object(self, depth: int) -> dict[str, Any]:
        """A schema of objects."""
        draw = self._random
        members = draw.sample(_NAMES, draw.randrange(3))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.schema(max(depth - 1, 0)) for name in members},
            "required": draw.sample(_NAMES, draw.randrange(2)),
        }
        more = [{}, {}, {}, {"additionalProperties": True}, {"additionalProperties": False}]
        return schema | draw.choice([*more, {"unevaluatedProperties": False}])

    def answer(self, grammar: str) -> str | None:
        """A text that a grammar allows, mostly a short one; None if none ends soon."""
        matcher = LLMatcher(_VOCABULARY, grammar, log_level=0, limits=LIMITS)
        written: list[int] = []
        while len(written) < _LONG and not matcher.is_stopped():
            if matcher.is_accepting() and self._random.random() < 0.5:
                break
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = [int(byte) for byte in np.nonzero(np.unpackbits(mask, bitorder="little")[:128])[0]]
            ends = [byte for byte in allowed if chr(byte) in '"]}']
            written.append(self._random.choice(ends if ends and len(written) > _LONG // 8 else allowed))
            matcher.consume_token(written[-1])
        return bytes(written).decode() if matcher.is_accepting() else None

    def rubbish(self, depth: int) -> Any:
        """Keywords with values of any kind."""
        draw = self._random
        plain: list[Any] = [
            None,
            True,
            0,
            -1.5,
            2**70,
            1e300,
            "a",
            "object",
            "#",
            "#/$defs/a",
            "^(?!a)b",
            [],
            {},
            ["a"],
        ]
        if depth == 0 or draw.random() < 0.3:
            return draw.choice(plain)
        keywords = [*_KINDS, "const", "enum", "format", "$id", "$anchor", "contains", "dependentRequired", "a"]
        return {name: self.rubbish(depth - 1) for name in draw.sample(keywords, draw.randrange(5))}


@pytest.mark.parametrize("seed", range(3))
def test_what_a_grammar_allows_follows_its_schema(seed: int) -> None:
    drawn, judged = Drawn(seed), 0
    for _ in range(60):
        schema = drawn.document()
        grammar, error = check_grammar("json_schema", schema)
        for text in [] if error else filter(None, (drawn.answer(grammar) for _ in range(2))):
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            judged += 1
    assert judged > 20


def test_no_schema_breaks_what_prepares_it() -> None:
    drawn, passed, refused = Drawn(7), 0, 0
    for _ in range(3000):
        schema = drawn.rubbish(5)
        if not isinstance(schema, dict):
            continue
        try:
            prepared(schema)
            passed += 1
        except SchemaError:
            refused += 1
    assert min(passed, refused) > 100
