"""The bodies of `POST /v1/documents` and `POST /v1/documents/{id}`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from longreach.api.schema.requests.attention_field import Attention
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
from longreach.documents.document import is_id

_TEN_YEARS = 315_360_000


def _name(value: str) -> str:
    if is_id(value):
        raise invalid("must not begin with `doc-` or `file-`, as ids do")
    if _NAME.fullmatch(value) is None:
        raise invalid("must have no control characters")
    return value


_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f]*")
_NAME_SCHEMA: Any = {"pattern": f"^(?!doc-|file-){_NAME.pattern}$"}
DocumentName = Annotated[
    str, Field(min_length=1, max_length=256, json_schema_extra=_NAME_SCHEMA), AfterValidator(_name)
]
Seconds = Annotated[int, Field(ge=1, le=_TEN_YEARS)]


def _token_ids(value: object) -> list[int] | None:
    if value is None:
        return None
    if not (ids := token_ids(value)):
        raise invalid("must not be empty")
    return ids


class DocumentFields(StrictModel):
    """What is said of a document beside its contents. Behind a text that is sent as it is, it stands in the URL."""

    model: Annotated[str | None, Field(min_length=1, max_length=256)] = Field(
        None, description="A name of the served model."
    )
    name: DocumentName | None = Field(
        None, description="What requests may refer to it by, where no other has this name. A chat's prompt shows it."
    )
    use: Literal["chat", "completion"] | None = Field(
        None, description="What is read ahead: a chat that begins with it (the default if the model has a template)."
    )
    ttl_seconds: Seconds | None = Field(
        None, description="Seconds after its last use for which it is kept; by default `--documents-days`."
    )
    pin: Annotated[bool, or_default(False)] = Field(
        False, description="It makes no room for others, and its pages are evicted last."
    )
    cache_salt: Annotated[str, or_default("")] = Field(
        "", max_length=256, description="The salt of requests that refer to it and give none."
    )
    attention: Attention = Field(
        None, description="The attention policy of requests that refer to it and give none; the server's default."
    )
    wait: Annotated[bool, or_default(False)] = Field(False, description="Answer when it has been read.")


class DocumentRequest(DocumentFields):
    """Keep a document for later prompts that begin with it, and read it into the prefix cache.

    It has a `text`, `messages` or `token_ids`.
    """

    text: Annotated[str | None, Field(min_length=1)] = Field(None, description="The text of the document.")
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        None, description="The beginning of a chat, such as a system message and the user's first one."
    )
    token_ids: Annotated[
        list[int] | None, PlainValidator(_token_ids), described({"anyOf": [TOKEN_IDS_SCHEMA, {"type": "null"}]})
    ] = Field(None, description="The token ids that a completion's prompt begins with.")

    @model_validator(mode="after")
    def _check_one(self) -> DocumentRequest:
        if sum(value is not None for value in (self.text, self.messages, self.token_ids)) != 1:
            raise invalid("give one of `text`, `messages` and `token_ids`", "missing_required_parameter")
        if self.token_ids is not None and self.use == "chat":
            raise invalid("`token_ids` can only stand before the prompt of a completion, not in a chat")
        if self.messages is not None and self.use == "completion":
            raise invalid("`messages` can only stand before a chat, not before a completion's prompt")
        return self

    @property
    def param(self) -> str:
        """The field that has the contents."""
        fields = ("text", "messages", "token_ids")
        return next(name for name in fields if getattr(self, name) is not None)


class DocumentChange(StrictModel):
    """Change what is given of a document."""

    name: DocumentName | None = Field(None, description="Another name. A chat's document is then read again.")
    ttl_seconds: Seconds | None = Field(None, description="Seconds after its last use for which it is kept.")
    pin: bool | None = Field(None, description="Whether it is pinned.")
