"""The body of `POST /v1/responses`, for text."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, StringConstraints, model_validator

from longreach.api.schema.requests.chat_messages import Content, Message
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.fields import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    StrictModel,
    described,
    invalid,
    neutral,
    only,
    or_default,
)
from longreach.api.schema.requests.formats import JsonSchema, Name
from longreach.api.schema.requests.sampling import SamplingFields

_MAX_METADATA = 16


class InputMessage(StrictModel):
    """A message of the input; `id` and `status` may come back with an earlier answer, and mean nothing here."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Annotated[str | None, Field(max_length=256)] = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> InputMessage:
        if self.content is None:
            raise invalid("`content` is missing")
        return self


def _input(value: object) -> list[Message]:
    if isinstance(value, str):
        if not value:
            raise invalid("must not be empty")
        return [Message(role="user", content=value)]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise invalid(f"must be a string or a list of 1 to {MAX_MESSAGES} messages", "invalid_type")
    found = []
    for item in value:
        if isinstance(item, dict) and item.get("type", "message") != "message":
            raise invalid("only items of the type `message` are supported", "unsupported_value")
        one = InputMessage.model_validate(item)
        found.append(Message(role=one.role, content=one.content))
    return found


_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"$ref": "#/components/schemas/InputMessage"},
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
        },
    ]
}


class TextFormat(StrictModel):
    """`text.format`: free text, any JSON object, or JSON that follows `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Annotated[str | None, Field(max_length=4096)] = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None and self.name is not None):
            raise invalid("`name` and `schema` belong to the type `json_schema`, and to no other")
        return self


class TextOptions(StrictModel):
    """`text`: the answer's form."""

    format: TextFormat | None = None
    verbosity: Annotated[Literal["medium"] | None, only(None, "medium")] = neutral(None, "medium")


class Reasoning(StrictModel):
    """`reasoning`: how much of it, for models whose chat template reads that."""

    effort: Annotated[str | None, Field(max_length=32)] = None
    summary: Annotated[None, only(None)] = neutral(None)
    generate_summary: Annotated[None, only(None)] = neutral(None)


Metadata = dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]]


class ResponseRequest(SamplingFields):
    """Answer a text or a chat. Nothing is stored; earlier turns are given in `input`."""

    NESTED: ClassVar = (InputMessage,)  # what the schema of `input` names

    input: Annotated[list[Message], PlainValidator(_input), described(_INPUT_SCHEMA)] = Field(
        description="A text, or the chat so far."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_PROMPT_TOKENS, description="By default whatever the context has left."
    )
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[Metadata | None, Field(max_length=_MAX_METADATA)] = Field(
        None, description="Returned as it is."
    )
    background: Annotated[Literal[False] | None, only(None, False)] = neutral(None, False)
    include: Annotated[list[Any] | None, only(None, [])] = neutral(None, [])
    parallel_tool_calls: Annotated[bool, or_default(True)] = Field(
        True, description="Without tools it asks for nothing."
    )
    previous_response_id: Annotated[None, only(None)] = neutral(None)
    store: Annotated[Literal[False] | None, only(None, False)] = neutral(None, False)
    tool_choice: Annotated[str | None, only(None, "auto", "none")] = neutral(None, "auto", "none")
    tools: Annotated[list[Any] | None, only(None, [])] = neutral(None, [])
    top_logprobs: Annotated[Literal[0] | None, only(None, 0)] = neutral(None, 0)
    truncation: Annotated[Literal["disabled"] | None, only(None, "disabled")] = neutral(None, "disabled")
    user: Annotated[None, only(None)] = neutral(None)

    @model_validator(mode="after")
    def _check_together(self) -> ResponseRequest:
        if self.max_output_tokens is not None and self.min_tokens > self.max_output_tokens:
            raise invalid(
                f"`min_tokens` ({self.min_tokens}) is greater than `max_output_tokens` ({self.max_output_tokens})"
            )
        if self.form is not None and self.min_tokens:
            raise invalid("`min_tokens` cannot be set where a grammar decides when the answer may end")
        return self

    @property
    def messages(self) -> list[Message]:
        """The whole chat."""
        if self.instructions is None:
            return self.input
        return [Message(role="system", content=self.instructions), *self.input]

    @property
    def form(self) -> tuple[Literal["json_schema"], dict[str, Any]] | None:
        """The JSON schema that the answer has to follow, if any."""
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return None
        return "json_schema", wanted.schema_ or {"type": "object"}

    @property
    def form_field(self) -> str:
        """The field that `form` comes from."""
        return "text.format"

    @property
    def turn(self) -> ChatTurn:
        """What is asked of the model."""
        return ChatTurn(
            messages=self.messages,
            param="input",
            form=self.form,
            form_field=self.form_field,
            variables={"reasoning_effort": None if self.reasoning is None else self.reasoning.effort},
        )
