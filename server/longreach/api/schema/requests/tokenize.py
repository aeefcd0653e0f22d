"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PlainValidator, model_validator

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    TOKEN_IDS_SCHEMA,
    StrictModel,
    described,
    invalid,
    or_default,
    token_ids,
)
from longreach.api.schema.requests.formats import Tool
from longreach.api.schema.requests.harmless import harmless
from longreach.api.schema.requests.template_fields import TemplateFields

Model = Annotated[str | None, Field(min_length=1, max_length=256)]


class TokenizeRequest(TemplateFields, harmless("tokenize")):
    """The token ids of a text, or of a chat as the model's template writes it."""

    model: Model = None
    prompt: str | None = Field(None, description="The text; this or `messages`.")
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=MAX_MESSAGES)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = Field(None, description="Functions of a chat.")
    add_special_tokens: bool | None = Field(
        None,
        description="Add what the tokenizer puts around a text; by default not to a chat, whose template does that.",
    )
    parse_special: Annotated[bool, or_default(True)] = Field(
        True, description="Read special tokens that are written in the text as such; a chat's messages are plain text."
    )
    return_token_strs: Annotated[bool, or_default(False)] = Field(False, description="Return each token's text, too.")

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either `prompt` or `messages`")
        if self.tools and self.messages is None:
            raise invalid("`tools` belong to `messages`")
        return self


class DetokenizeRequest(StrictModel):
    """The text of token ids; special tokens have none."""

    model: Model = None
    tokens: Annotated[list[int], PlainValidator(token_ids), described({**TOKEN_IDS_SCHEMA, "minItems": 0})]
