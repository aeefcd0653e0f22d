"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PlainValidator, model_validator

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.fields import (
    MAX_MESSAGES,
    TOKEN_IDS_SCHEMA,
    StrictModel,
    described,
    invalid,
    or_default,
    token_ids,
)
from longreach.api.schema.requests.harmless import harmless

Model = Annotated[str | None, Field(min_length=1, max_length=256)]


class TokenizeRequest(harmless("tokenize")):
    """The token ids of a text, or of a chat as the model's template writes it."""

    model: Model = None
    prompt: str | None = Field(None, description="The text; this or `messages`.")
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=MAX_MESSAGES)] = None
    add_special_tokens: Annotated[bool, or_default(True)] = Field(
        True, description="Add what the tokenizer puts around a text; a chat's template does that itself."
    )
    parse_special: Annotated[bool, or_default(True)] = Field(
        True, description="Read special tokens that are written in the text as such; a chat's messages are plain text."
    )
    add_generation_prompt: Annotated[bool, or_default(True)] = Field(
        True, description="End a chat where the assistant's answer begins."
    )
    return_token_strs: Annotated[bool, or_default(False)] = Field(False, description="Return each token's text, too.")

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either `prompt` or `messages`")
        return self


class DetokenizeRequest(StrictModel):
    """The text of token ids; special tokens have none."""

    model: Model = None
    tokens: Annotated[list[int], PlainValidator(token_ids), described({**TOKEN_IDS_SCHEMA, "minItems": 0})]
