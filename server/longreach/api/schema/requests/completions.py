"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, model_validator

from longreach.api.schema.requests.fields import (
    MAX_CHOICES,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_TOP_LOGPROBS,
    TOKEN_IDS_SCHEMA,
    described,
    invalid,
    or_default,
    strings,
    token_ids,
)
from longreach.api.schema.requests.formats import FormFields
from longreach.api.schema.requests.harmless import harmless
from longreach.api.schema.requests.sampling import ChoiceFields, SamplingFields
from longreach.api.schema.requests.token_fields import UNLIMITED, TokenFields

Prompts = list[str] | list[list[int]]


def _prompts(value: object) -> Prompts:
    """One prompt or a batch, each a string or token ids, as a list."""
    if not isinstance(value, str | list):
        raise invalid("must be a string, a list of token ids, or a list of such prompts", "invalid_type")
    batch: list[Any] = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(batch) > MAX_PROMPTS:
        raise invalid(f"must have at most {MAX_PROMPTS} prompts")
    of_many = batch is value
    for index, prompt in enumerate(batch):
        if not prompt:
            raise invalid("must not be empty", at=index if of_many else None)
    if isinstance(batch[0], str):
        return strings(batch, "all strings or all lists of token ids")
    return [token_ids(prompt, index if of_many else None) for index, prompt in enumerate(batch)]


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        TOKEN_IDS_SCHEMA,
        {"type": "array", "items": TOKEN_IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(SamplingFields, ChoiceFields, FormFields, TokenFields, harmless("completions")):
    """Continue one or several prompts.

    What OpenAI does not have is vLLM's, but for `return_progress`, `parse_special` and `n_predict` (llama.cpp's),
    `speculate`, `regex`, `grammar` and `ebnf`.
    """

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    prompt: Annotated[Prompts, PlainValidator(_prompts), described(_PROMPT_SCHEMA)] = Field(
        description="A string, token ids, or a batch of either."
    )
    max_tokens: int | None = Field(
        None,
        ge=UNLIMITED,
        le=MAX_PROMPT_TOKENS,
        description="16 by default; -1: whatever the context has left; 0 only with `echo`: nothing is generated.",
    )
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Answer each prompt so often and return the `n` likeliest a token."
    )
    echo: Annotated[bool, or_default(False)] = Field(
        False, description="Put the prompt before the answer; with `logprobs`, its tokens' too."
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Log-probabilities of tokens, and so many of the likeliest."
    )
    parse_special: Annotated[bool, or_default(True)] = Field(
        True, description="Read special tokens that are written in the prompt as such; false: as plain text."
    )

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.limit == 0 and not self.echo:
            raise invalid("`max_tokens` must be at least 1 without `echo`")
        if self.limit is not None and self.min_tokens > self.limit:
            raise invalid(f"`min_tokens` ({self.min_tokens}) is greater than `max_tokens` ({self.limit})")
        if self.candidates < self.n:
            raise invalid(f"`best_of` ({self.best_of}) is less than `n` ({self.n})")
        if self.candidates > self.n and self.stream:
            raise invalid("`best_of` cannot choose among answers that are streamed; leave it out or set it to `n`")
        check_stream_fields(self)
        self.check_prompt_logprobs(self.stream)
        return self

    @property
    def limit(self) -> int | None:
        """Tokens that an answer may have, or None for what the context has left."""
        limit = self.n_predict if self.max_tokens is None else self.max_tokens
        if limit is None:
            return self.DEFAULT_MAX_TOKENS
        return None if limit == UNLIMITED else limit

    @property
    def candidates(self) -> int:
        """Answers that are generated for each prompt."""
        return self.n if self.best_of is None else self.best_of


def check_stream_fields(body: ChoiceFields) -> None:
    """Refuse what only a stream can tell of."""
    stream: bool = getattr(body, "stream", False)
    if body.stream_options is not None and not stream:
        raise invalid("`stream_options` is only allowed with `stream: true`")
    if body.return_progress and not stream:
        raise invalid("`return_progress` is only allowed with `stream: true`")
