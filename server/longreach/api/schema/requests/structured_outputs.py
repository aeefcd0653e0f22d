"""The forms of an answer under vLLM's and SGLang's names: `structured_outputs`, `guided_*` and `ebnf`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, PlainValidator

from longreach.api.schema.requests.fields import StrictModel, check_levels, described, invalid, neutral, only

FormKind = Literal["json_schema", "regex", "lark", "ebnf"]
Form = tuple[FormKind, str | dict[str, Any]]

MAX_OPTIONS = 4096

Text = Annotated[str | None, Field(min_length=1)]
Choice = Annotated[list[str] | None, Field(min_length=1, max_length=MAX_OPTIONS)]


def _schema(value: object) -> dict[str, Any] | None:
    """A JSON schema, as an object or as its text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise invalid(f"is no JSON schema: {error}") from None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid("must be a JSON schema: an object, or its text", "invalid_type")
    check_levels(value)
    return value


SchemaOrText = Annotated[
    dict[str, Any] | None,
    PlainValidator(_schema),
    described({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
]


class StructuredOutputs(StrictModel):
    """`structured_outputs`: one of these forms, as in vLLM. JSON is written on one line."""

    json_: SchemaOrText = Field(None, alias="json", description="JSON that follows this schema.")
    regex: Text = Field(None, description="As the field `regex`.")
    choice: Choice = Field(None, description="One of these texts.")
    grammar: Text = Field(None, description="As the field `ebnf`.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: Annotated[None, only(None)] = neutral(None)
    whitespace_pattern: Annotated[None, only(None)] = neutral(None)
    disable_additional_properties: bool | None = Field(None, description="Asks for what is done anyway.")
    disable_any_whitespace: bool | None = Field(None, description="Asks for what is done anyway.")
    disable_fallback: bool | None = Field(None, description="Asks for what is done anyway.")


_NONE = StructuredOutputs.model_validate({})


class GuidedFields(StrictModel):
    """The forms of an answer under other servers' names."""

    structured_outputs: StructuredOutputs | None = Field(None, description="The form of the answer; vLLM's.")
    guided_json: SchemaOrText = Field(None, description="`structured_outputs.json` under its older name.")
    guided_regex: Text = Field(None, description="`regex` under vLLM's older name.")
    guided_choice: Choice = Field(None, description="`structured_outputs.choice` under its older name.")
    guided_grammar: Text = Field(None, description="`ebnf` under vLLM's older name.")
    guided_json_object: bool | None = Field(None, description="`structured_outputs.json_object` under its older name.")
    ebnf: Text = Field(
        None, description="The answer is a sentence of this grammar, in GBNF, Lark, or llguidance's own JSON."
    )


def guided_forms(fields: GuidedFields) -> Iterator[tuple[str, Form]]:
    """The forms that are asked for under these names, each with the name."""
    outputs = fields.structured_outputs or _NONE
    asked: list[tuple[str, FormKind, Any]] = [
        ("structured_outputs.json", "json_schema", outputs.json_),
        ("structured_outputs.regex", "regex", outputs.regex),
        ("structured_outputs.choice", "lark", _one_of(outputs.choice)),
        ("structured_outputs.grammar", "ebnf", outputs.grammar),
        ("structured_outputs.json_object", "json_schema", {"type": "object"} if outputs.json_object else None),
        ("guided_json", "json_schema", fields.guided_json),
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_choice", "lark", _one_of(fields.guided_choice)),
        ("guided_grammar", "ebnf", fields.guided_grammar),
        ("guided_json_object", "json_schema", {"type": "object"} if fields.guided_json_object else None),
        ("ebnf", "ebnf", fields.ebnf),
    ]
    return ((name, (kind, source)) for name, kind, source in asked if source is not None)


def _one_of(texts: list[str] | None) -> str | None:
    """A grammar in Lark of which each of `texts` is a sentence. Lark's strings are JSON's."""
    return None if texts is None else "start: " + " | ".join(map(json.dumps, texts))
