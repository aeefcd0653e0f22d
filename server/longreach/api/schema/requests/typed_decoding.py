"""Decoding a long body by the types of its fields, so that it stops at the first thing that is wrong.

A body of thirty megabytes may be thirty million empty lists. Made into Python's objects before anybody looks, they take
a gigabyte and hold the interpreter's lock for seconds. So a long body is first cut into its members, which makes no
objects, and each long member is decoded as what its JSON schema allows. The model's own checks follow, as for a short
body: this only keeps out what could never pass them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from longreach.api.schema.requests.schema_types import (
    PREFIX,
    Schema,
    Strangers,
    alternatives,
    can_be_named,
    elements,
    kind_of,
    member_type,
)
from longreach.errors import ContextLengthError, InvalidRequestError, quoted
from longreach.sizes import MAX_PROMPT_TOKENS
from longreach.util import exact_json

# Members up to this length are decoded at once: the model's checks then say what is wrong with them.
_SHORT_BYTES = 16 * 1024
# What may be any JSON, such as the schema of a function's arguments: each, and all of a body together.
MAX_FREE_BYTES = 256 * 1024
MAX_ALL_FREE_BYTES = 1024 * 1024

_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_WHERE = re.compile(r"(?s)(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?")
_UNKNOWN = re.compile(r"(?s)Object contains unknown field `(?P<name>.*)`")
_TOO_MANY = re.compile(r"Expected `array` of at most length (?P<most>[0-9]+)")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")

_CUTS = "truncate_prompt_tokens"  # with it, a prompt may be longer than what is read of it
_MOST_STRANGERS = 32


class _UnknownMemberError(InvalidRequestError):
    """A member that its object does not have; `name` is the member's own."""

    def __init__(self, param: str, name: str) -> None:
        message = f"Unrecognized request argument: {quoted(param)}."
        super().__init__(message, param=param[:256], code="unknown_parameter")
        self.name = name


def decode(model: type[BaseModel], body: bytes | bytearray, most_tokens: int) -> dict[str, Any]:
    """The members of a JSON object, decoded; those that `model` does not have, or has of another type, are refused.

    Null is taken under names that no object has, and members that change nothing are skipped: up to 32 names together,
    without quotation marks, backslashes and control characters. The body is read again for each of them. Prompts of
    more than `most_tokens` token ids are refused before their ids are read.

    Raises:
        InvalidRequestError: as above, or it is no JSON object; names the member.
        ContextLengthError: as above.
    """
    strangers: Strangers = ()
    while True:
        try:
            return _decoded(_shape(model, strangers), body, most_tokens)
        except _UnknownMemberError as error:
            if error.name in strangers or len(strangers) == _MOST_STRANGERS or not can_be_named(error.name):
                raise
            strangers = (*strangers, error.name)


def _decoded(shape: _Shape, body: bytes | bytearray, most_tokens: int) -> dict[str, Any]:
    try:
        raws = shape.members.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refused("", error, shape.strangers) from None
    budget = _Budget(shape.free_bytes)
    decoded = {}
    names = zip(raws.__struct_encode_fields__, raws.__struct_fields__, strict=True)
    given = {name: raw for name, member in names if (raw := getattr(raws, member)) is not msgspec.UNSET}
    if bytes(given.get(_CUTS, b"null")) != b"null":
        most_tokens = MAX_PROMPT_TOKENS
    for name, raw in given.items():
        if name in shape.schemas:
            decoded[name] = _member(shape, name, bytes(raw), budget, most_tokens)
        elif bytes(raw) == b"null":
            decoded[name] = None
        else:
            raise _UnknownMemberError(name, name)
    return decoded


@dataclass(frozen=True)
class _Shape:
    """A model's members: a decoder that only cuts, their JSON schemas, and the schemas' definitions."""

    members: msgspec.json.Decoder[Any]
    schemas: dict[str, Schema]
    definitions: dict[str, Schema]
    free_bytes: int  # of what may be any JSON, together
    strangers: Strangers = ()


def _shape(model: type[BaseModel], strangers: Strangers = ()) -> _Shape:
    shape = _own_shape(model)
    if not strangers:
        return shape
    return replace(shape, members=_cutter([*shape.schemas], strangers), strangers=strangers)


@functools.cache
def _own_shape(model: type[BaseModel]) -> _Shape:
    nested: tuple[type[BaseModel], ...] = getattr(model, "NESTED", ())
    models = [(one, "validation") for one in (model, *nested)]
    _, whole = models_json_schema(models, ref_template=PREFIX + "{model}")  # pyright: ignore[reportArgumentType]
    definitions = whole["$defs"]
    schemas = definitions[model.__name__]["properties"]
    return _Shape(_cutter([*schemas], ()), schemas, definitions, getattr(model, "FREE_BYTES", MAX_ALL_FREE_BYTES))


def _cutter(names: list[str], strangers: Strangers) -> msgspec.json.Decoder[Any]:
    """A decoder of an object's members that leaves their values as they are."""
    known = dict.fromkeys([*names, *strangers])
    rename = {f"field{number}": name for number, name in enumerate(known)}
    fields = [(own, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for own in rename]
    return msgspec.json.Decoder(
        msgspec.defstruct("Members", fields, rename=rename, forbid_unknown_fields=True, gc=False)
    )


class _Budget:
    """Decodes what may be any JSON, up to so many bytes together."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def decode(self, raw: bytes, where: str) -> object:
        self._left -= len(raw)
        if len(raw) > MAX_FREE_BYTES or self._left < 0:
            limit = MAX_FREE_BYTES if len(raw) > MAX_FREE_BYTES else self._most
            which = "must have at most" if limit == MAX_FREE_BYTES else "with others of its kind it must have at most"
            raise _invalid(where, f"{which} {limit} bytes of JSON", "invalid_value")
        return _loaded(raw)


def _member(shape: _Shape, name: str, raw: bytes, budget: _Budget, most_tokens: int) -> object:
    if len(raw) <= _SHORT_BYTES:
        return _loaded(raw)
    simple = alternatives(shape.schemas[name], shape.definitions)
    if simple is None:
        return budget.decode(raw, name)
    kind = kind_of(raw[:1])
    fitting = [one for one in simple if one["type"] == kind or (kind == "integer" and one["type"] == "number")]
    if kind == "array" and len(fitting) > 1:  # of several lists, the one that the first element fits
        first = kind_of(raw[1:1024].lstrip()[:1])
        fitting = [one for one in fitting if first in (item["type"] for item in alternatives(one["items"], {}) or [])]
    if not fitting:
        allowed = " or ".join(dict.fromkeys(_NAMES[one["type"]] for one in simple))
        raise _invalid(name, f"must be {allowed}, got {_NAMES[kind]}", "invalid_type")
    schema = fitting[0]
    if kind == "array" and (items := alternatives(schema["items"], {})) and len(items) == 1:
        if items[0]["type"] == "integer":
            return _ids(raw, name, most_tokens)
        if items[0]["type"] == "array":
            return _lists_of_ids(raw, name, schema, most_tokens)
    value = _typed(raw, member_type(schema, shape.definitions, shape.strangers), name, shape.strangers)
    if isinstance(value, list) and len(value) > schema.get("maxItems", len(value)):
        raise _invalid(name, f"must have at most {schema['maxItems']} elements", "invalid_value")
    return _plain(value, name, budget)


def _ids(raw: bytes, where: str, most_tokens: int) -> object:
    count = raw.count(b",") + 1
    if count > most_tokens:
        raise ContextLengthError(count, 1, most_tokens, param=where.partition(".")[0])
    return _typed(raw, list[int], where)


def _lists_of_ids(raw: bytes, where: str, schema: Schema, most_tokens: int) -> object:
    # A list of lists of numbers has no brackets but its own.
    if raw.count(b"[") - 1 > schema["maxItems"]:
        raise _invalid(where, f"must have at most {schema['maxItems']} lists", "invalid_value")
    lists: list[msgspec.Raw] = _typed(raw, list[msgspec.Raw], where)
    return [_ids(bytes(one), f"{where}.{index}", most_tokens) for index, one in enumerate(lists)]


def _typed(raw: bytes, kind: Any, where: str, strangers: Strangers = ()) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refused(where, error, strangers) from None


def _plain(value: object, where: str, budget: _Budget) -> object:
    """The value with dicts in place of structs, and with what may be any JSON decoded."""
    if isinstance(value, msgspec.Raw):
        return budget.decode(bytes(value), where)
    if (listed := elements(value)) is not None:
        return [_plain(item, f"{where}.{index}", budget) for index, item in enumerate(listed)]
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        skipped: frozenset[str] = getattr(value, "skipped")  # noqa: B009 - `type_of` gives it
        members = ((encoded, getattr(value, name)) for name, encoded in names if encoded not in skipped)
        return {name: _plain(v, f"{where}.{name}", budget) for name, v in members if v is not msgspec.UNSET}
    return value


def _loaded(raw: bytes) -> object:
    try:
        return exact_json.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None


def _refused(where: str, error: Exception, strangers: Strangers = ()) -> InvalidRequestError:
    """What the caller is told of an error of msgspec's."""
    if not isinstance(error, msgspec.ValidationError):
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return InvalidRequestError(f"The request body is not valid JSON: {why}.", code="invalid_json")
    found = _WHERE.fullmatch(str(error))
    assert found is not None, "the expression matches anything"
    path = ".".join(re.findall(r"[^.\[\]]+", found["path"] or ""))
    param = ".".join(part for part in (where, path) if part)
    if (unknown := _UNKNOWN.fullmatch(found["what"])) is not None:
        return _UnknownMemberError(".".join(part for part in (param, unknown["name"]) if part), unknown["name"])
    if found["what"].startswith("Expected `null`, got") and param.rpartition(".")[2] in strangers:
        return _UnknownMemberError(param, param.rpartition(".")[2])
    if (missing := _MISSING.fullmatch(found["what"])) is not None:
        name = f"{param}.{missing['name']}"[:256]
        return InvalidRequestError(f"`{name}` is required.", param=name, code="missing_required_parameter")
    if (many := _TOO_MANY.match(found["what"])) is not None:
        return _invalid(param, f"must have at most {many['most']} elements", "invalid_value")
    if not param:
        return InvalidRequestError("The request body must be a JSON object.", code="invalid_type")
    return _invalid(param, found["what"][:1].lower() + found["what"][1:], "invalid_type")


def _invalid(param: str, why: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param[:256]}`: {why}.", param=param[:256], code=code)
