"""Fields of vLLM's that speak of tokens: which ids are told, which prompt is read, how long an answer may be."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from longreach.api.schema.requests.fields import (
    MAX_PROMPT_TOKENS,
    MAX_TOP_LOGPROBS,
    StrictModel,
    invalid,
    or_default,
)

# Stands for a number of tokens without a bound: what the context has left.
UNLIMITED = -1


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise invalid("must be at least 1, or -1 for what the context has left")
    return value


Limit = Annotated[
    int | None,
    Field(ge=UNLIMITED, le=MAX_PROMPT_TOKENS, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_not_zero),
]


RequestName = Annotated[str | None, StringConstraints(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$")]


class TokenFields(StrictModel):
    """What is told of tokens beside the text, and how the prompt's are made. All are vLLM's but for `n_predict`."""

    return_token_ids: Annotated[bool, or_default(False)] = Field(
        False, description="Tell the token ids of the prompt (in a stream once) and of the answer."
    )
    return_tokens_as_token_ids: Annotated[bool, or_default(False)] = Field(
        False, description="Log-probabilities name a token `token_id:7` instead of by its text."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Log-probabilities of the prompt's tokens, and so many of the likeliest; not in a stream.",
    )
    truncate_prompt_tokens: Limit = Field(
        None, description="Read so many of the prompt's last tokens; -1: as many as leave room for the answer."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="With the tokens that the tokenizer puts around a text. By default around a raw prompt, and not "
        "around a chat, whose template does that.",
    )
    request_id: RequestName = Field(
        None, description="What the answer's id ends in; `X-Request-Id` names the request in the log."
    )
    rid: RequestName = Field(None, description="SGLang's name of `request_id`, which goes before it.")
    n_predict: Limit = Field(None, description="llama.cpp's name of `max_tokens`, which goes before it.")

    @property
    def answer_name(self) -> str | None:
        """What the answer's id ends in, if the caller says."""
        return self.request_id or self.rid

    def check_prompt_logprobs(self, stream: bool) -> None:
        """Refuse what a stream does not tell."""
        if self.prompt_logprobs is not None and stream:
            raise invalid("`prompt_logprobs` are not told in a stream; leave `stream` out")
