"""The parts that request models are made of: strictness, bounds, neutral values, and lists that are checked at once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, PlainValidator, model_validator
from pydantic_core import core_schema

from longreach.sizes import MAX_PROMPT_TOKENS as MAX_PROMPT_TOKENS
from longreach.util import strict_models
from longreach.util.strict_models import invalid as invalid
from longreach.util.strict_models import located as located

MAX_PROMPTS = 64
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_ALL_STOP_CHARACTERS = 4096
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_TOP_LOGPROBS = 20
MAX_SPECULATE = 32
MAX_MESSAGES = 65536
MAX_TOOLS = 128
MAX_LEVELS = 64

# Beyond these a number with a point may stand for several integers.
_EXACT_INTEGERS = 2**53

_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]


class StrictModel(strict_models.StrictModel):
    """An object of a request: members of exact types. Null asks for nothing, under whatever name it comes.

    A whole number is an integer, however it is written: JSON Schema counts 20.0 as one.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})

    @model_validator(mode="before")
    @classmethod
    def _without_strangers(cls, members: object) -> object:
        if not isinstance(members, dict):
            return members
        names, integers = _members_of(cls)
        strangers = {name for name, value in members.items() if value is None and name not in names}
        whole = {
            name: int(value)
            for name, value in members.items()
            if type(value) is float and name in integers and value.is_integer() and abs(value) < _EXACT_INTEGERS
        }
        if not strangers and not whole:
            return members
        return {name: value for name, value in members.items() if name not in strangers} | whole


@functools.cache
def _members_of(model: type[StrictModel]) -> tuple[frozenset[str], frozenset[str]]:
    """The names of a model's members, and of those that are integers."""
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    return frozenset(fields), frozenset(name for name, info in fields.items() if info.annotation in (int, int | None))


@dataclass(frozen=True)
class or_default:  # noqa: N801 - reads as a function where it is used
    """JSON null means the default, as it does for OpenAI; the field's JSON schema says so."""

    default: object

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._replaced, handler(source))

    def __get_pydantic_json_schema__(self, core: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {"anyOf": [handler(core), {"type": "null"}]}

    def _replaced(self, value: object) -> object:
        return self.default if value is None else value


def only(*allowed: object) -> PlainValidator:
    """Accept the values that ask for nothing; `True` is not 1 and `0.0` is 0."""

    def check(value: object) -> object:
        for neutral in allowed:
            if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
                return value
        shown = " or ".join(msgspec.json.encode(neutral).decode() for neutral in allowed)
        raise invalid(f"only {shown} is supported", "unsupported_value")

    return PlainValidator(check)


def neutral(*allowed: Any) -> Any:
    """The field of a value that only `only(*allowed)` accepts."""
    return Field(
        allowed[0], description="Not supported: only what asks for nothing.", json_schema_extra={"enum": [*allowed]}
    )


def token_ids(value: object, at: int | None = None) -> list[int]:
    """A list of token ids, checked by msgspec: pydantic takes several times as long for a million.

    In a list of such lists it stands `at` a place, which errors name.
    """
    if not isinstance(value, list):
        raise invalid("must be a list of token ids", "invalid_type", at)
    if len(value) > MAX_PROMPT_TOKENS:
        raise invalid(f"must have at most {MAX_PROMPT_TOKENS} token ids", at=at)
    try:
        return msgspec.convert(value, _TokenIds)
    except msgspec.ValidationError:
        wrong = next((i for i, token in enumerate(value) if not _is_token_id(token)), 0)
        place = wrong if at is None else f"{at}.{wrong}"
        raise invalid("token ids must be non-negative integers", "invalid_type", place) from None


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def strings(value: object, what: str) -> list[str]:
    """A list of strings; an error names the first that is none."""
    if not isinstance(value, list):
        raise invalid(f"must be {what}", "invalid_type")
    for index, one in enumerate(value):
        if not isinstance(one, str):
            raise invalid(f"must be {what}", "invalid_type", index)
    return value


def check_levels(value: object) -> None:
    """Refuse JSON of more than `MAX_LEVELS` levels: what writes or compiles it goes down a call for each."""
    if is_deeper(value, MAX_LEVELS):
        raise invalid(f"must have at most {MAX_LEVELS} levels of objects and lists")


def is_deeper(value: object, levels: int) -> bool:
    """Whether JSON has more than so many levels of objects and lists."""
    level = [value]
    for _ in range(levels + 1):
        level = [inner for outer in level for inner in _members(outer)]
        if not level:
            return False
    return True


def _members(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _stop(value: object) -> list[str]:
    given = [] if value in (None, "") else [value] if isinstance(value, str) else value
    stops = strings(given, "a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise invalid(f"must have at most {MAX_STOPS} strings")
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            place = None if isinstance(value, str) else index
            raise invalid(f"must have 1 to {MAX_STOP_CHARACTERS} characters", at=place)
    if sum(map(len, stops)) > MAX_ALL_STOP_CHARACTERS:
        raise invalid(f"the strings must have at most {MAX_ALL_STOP_CHARACTERS} characters together")
    return stops


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid("must be an object of token ids and numbers", "invalid_type")
    if len(value) > MAX_LOGIT_BIASES:
        raise invalid(f"must have at most {MAX_LOGIT_BIASES} token ids")
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 for key in value):
        raise invalid("its keys must be token ids")
    if not all(isinstance(bias, int | float) and not isinstance(bias, bool) for bias in value.values()):
        raise invalid("its values must be numbers", "invalid_type")
    if not all(-100 <= bias <= 100 for bias in value.values()):
        raise invalid("its values must be from -100 to 100")
    biases = {int(key): float(bias) for key, bias in value.items()}
    if len(biases) < len(value):
        twice = next(token for token, count in Counter(map(int, value)).items() if count > 1)
        raise invalid(f"token id {twice} is given more than once")
    return biases


_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_STOP_CHARACTERS},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
            "maxItems": MAX_STOPS,
        },
        {"type": "null"},
    ]
}
_LOGIT_BIAS_SCHEMA = {
    "type": ["object", "null"],
    "propertyNames": {"type": "string", "pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_LOGIT_BIASES,
}


def described(schema: dict[str, Any]) -> Any:
    """Metadata that gives a field this JSON schema, keeping its own description and default."""
    return _Described(schema)


class _Described:
    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema

    def __get_pydantic_json_schema__(self, _core: Any, _handler: Any) -> dict[str, Any]:
        return dict(self._schema)


Stops = Annotated[list[str], PlainValidator(_stop), described(_STOP_SCHEMA)]
LogitBias = Annotated[dict[int, float], PlainValidator(_logit_bias), described(_LOGIT_BIAS_SCHEMA)]
TOKEN_IDS_SCHEMA = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "minItems": 1,
    "maxItems": MAX_PROMPT_TOKENS,
}
