"""What a request may say. Every field is strictly typed and bounded here, before anything is spent on it.

JSON `true` is not a number, `"7"` is not 7, and a field that is not listed is refused by name. A field that OpenAI has
and this server does not honour is listed with its neutral value, which clients send unasked; any other is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from longreach.errors import InvalidRequestError, quoted

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_PROMPT_TOKENS = 2**24
MAX_SPECULATE = 32

_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]


def _invalid(message: str, code: str = "invalid_value") -> PydanticCustomError:
    return PydanticCustomError("longreach", "{message}", {"message": message, "code": code})


def _prompt(value: object) -> str | list[int]:
    """A string or one list of token ids, which msgspec checks: pydantic takes several times as long for a million."""
    if isinstance(value, str):
        if not value:
            raise _invalid("must not be empty")
        return value
    if not isinstance(value, list):
        raise _invalid("must be a string or a list of token ids", "invalid_type")
    if not value:
        raise _invalid("must not be empty")
    if isinstance(value[0], str | list):
        raise _invalid("a batch of prompts is not supported; send one request for each prompt", "unsupported_value")
    if len(value) > MAX_PROMPT_TOKENS:
        raise _invalid(f"must have at most {MAX_PROMPT_TOKENS} token ids")
    try:
        return msgspec.convert(value, _TokenIds)
    except msgspec.ValidationError:
        raise _invalid("token ids must be non-negative integers", "invalid_type") from None


def _stop(value: object) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _invalid("must be a string or a list of strings", "invalid_type")
    if len(stops) > MAX_STOPS:
        raise _invalid(f"must have at most {MAX_STOPS} strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise _invalid(f"each string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _only(*allowed: object) -> PlainValidator:
    """Accept the values that ask for nothing; `True` is not 1 and `0.0` is 0."""

    def check(value: object) -> object:
        for neutral in allowed:
            if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
                return value
        shown = " or ".join("null" if neutral is None else str(neutral).lower() for neutral in allowed)
        raise _invalid(f"only {shown} is supported", "unsupported_value")

    return PlainValidator(check)


def _or(default: object) -> BeforeValidator:
    """JSON null means the default, as it does for OpenAI."""
    return BeforeValidator(lambda value: default if value is None else value)


def _neutral(*allowed: Any) -> Any:
    return Field(
        allowed[0], description="Not supported: only what asks for nothing.", json_schema_extra={"enum": [*allowed]}
    )


class StreamOptions(BaseModel):
    """`stream_options`: whether a last chunk with the usage is sent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: Annotated[bool, _or(False)] = False


class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`.

    Defaults are OpenAI's; `top_k`, `min_tokens`, `ignore_eos`, `priority` and `cache_salt` are vLLM's.
    """

    model_config = ConfigDict(strict=True, extra="forbid", validate_default=False)

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    model: str = Field(min_length=1, max_length=256)
    prompt: Annotated[str | list[int], PlainValidator(_prompt, json_schema_input_type=str | list[int])]
    max_tokens: Annotated[int, _or(DEFAULT_MAX_TOKENS)] = Field(DEFAULT_MAX_TOKENS, ge=1, le=MAX_PROMPT_TOKENS)
    min_tokens: Annotated[int, _or(0)] = Field(0, ge=0, le=MAX_PROMPT_TOKENS)
    temperature: Annotated[float, _or(1.0)] = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: Annotated[float, _or(1.0)] = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Annotated[int, _or(0)] = Field(0, ge=-1, le=2**31 - 1, description="0 or -1: no limit.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[str], PlainValidator(_stop, json_schema_input_type=str | list[str] | None)] = []
    ignore_eos: Annotated[bool, _or(False)] = False
    priority: Annotated[int, _or(0)] = Field(0, ge=-100, le=100, description="Prompts of a smaller number go first.")
    cache_salt: Annotated[str, _or("")] = Field(
        "", max_length=256, description="Only requests with the same salt share cached prefixes."
    )
    speculate: int | None = Field(
        None, ge=0, le=MAX_SPECULATE, description="Tokens that prompt lookup may draft a step; 0: none."
    )
    stream: Annotated[bool, _or(False)] = False
    stream_options: StreamOptions | None = None

    n: Annotated[Literal[1] | None, _only(1, None)] = _neutral(1, None)
    best_of: Annotated[Literal[1] | None, _only(1, None)] = _neutral(1, None)
    echo: Annotated[Literal[False] | None, _only(False, None)] = _neutral(False, None)
    logprobs: Annotated[None, _only(None)] = _neutral(None)
    suffix: Annotated[Literal[""] | None, _only(None, "")] = _neutral(None, "")
    logit_bias: Annotated[dict[str, float] | None, _only(None, {})] = _neutral(None, {})
    presence_penalty: Annotated[Literal[0] | None, _only(0, None)] = _neutral(0, None)
    frequency_penalty: Annotated[Literal[0] | None, _only(0, None)] = _neutral(0, None)
    repetition_penalty: Annotated[Literal[1] | None, _only(1, None)] = _neutral(1, None)
    min_p: Annotated[Literal[0] | None, _only(0, None)] = _neutral(0, None)
    user: Annotated[None, _only(None)] = _neutral(None)

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.min_tokens > self.max_tokens:
            raise _invalid(f"`min_tokens` ({self.min_tokens}) is greater than `max_tokens` ({self.max_tokens})")
        if self.stream_options is not None and not self.stream:
            raise _invalid("`stream_options` is only allowed with `stream: true`")
        return self


def completion_json_schema() -> dict[str, Any]:
    """The request's JSON schema with nested models in place: a `$ref` would not resolve inside an OpenAPI document."""
    schema = CompletionRequest.model_json_schema(mode="validation")
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inline(definitions[node["$ref"].rpartition("/")[2]])
            return {key: inline(value) for key, value in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    return inline(schema)


def parse_completion(body: object) -> CompletionRequest:
    """Check a decoded JSON body.

    Raises:
        InvalidRequestError: naming the field and what it may be.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_type")
    try:
        return CompletionRequest.model_validate(body)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False)) from None


def _as_api_error(problems: Sequence[Any]) -> InvalidRequestError:
    """OpenAI reports one field at a time; an unknown field comes first, being the likelier slip."""
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    param = ".".join(str(part)[:64] for part in problem["loc"]) or None
    if problem["type"] == "extra_forbidden":
        shown = quoted(".".join(map(str, problem["loc"])))
        return InvalidRequestError(f"Unrecognized request argument: {shown}.", param=param, code="unknown_parameter")
    if problem["type"] == "missing":
        return InvalidRequestError(f"`{param}` is required.", param=param, code="missing_required_parameter")
    message: str = problem["msg"]
    if problem["type"] == "longreach":
        code = problem["ctx"]["code"]
    else:
        code = "invalid_type" if problem["type"].endswith("_type") else "invalid_value"
        message = message.replace("Input should", "must", 1)
        if isinstance(problem["input"], bool | int | float):
            message += f", got {quoted(problem['input'])}"
    return InvalidRequestError(f"`{param}`: {message}." if param else f"{message}.", param=param, code=code)
