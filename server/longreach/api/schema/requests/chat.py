"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.completions import check_stream_fields
from longreach.api.schema.requests.fields import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    MAX_TOP_LOGPROBS,
    invalid,
    or_default,
)
from longreach.api.schema.requests.formats import FormFields, ToolFields
from longreach.api.schema.requests.harmless import harmless
from longreach.api.schema.requests.sampling import ChoiceFields, SamplingFields


class ChatRequest(SamplingFields, ChoiceFields, FormFields, ToolFields, harmless("chat")):
    """Answer the last message of a chat."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, description="The chat so far.")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_PROMPT_TOKENS, description="By default whatever the context has left."
    )
    max_tokens: int | None = Field(
        None, ge=1, le=MAX_PROMPT_TOKENS, description="The older name; `max_completion_tokens` goes before it."
    )
    logprobs: Annotated[bool, or_default(False)] = Field(False, description="Log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="So many of the likeliest tokens at each place; needs `logprobs`."
    )
    reasoning_effort: Annotated[str | None, Field(max_length=32)] = Field(
        None, description="Given to the model's chat template; refused if that does not read it."
    )
    enable_thinking: bool | None = Field(
        None, description="Given to the model's chat template; refused if that does not read it."
    )

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        limit = self.limit
        if limit is not None and self.min_tokens > limit:
            raise invalid(f"`min_tokens` ({self.min_tokens}) is greater than `max_tokens` ({limit})")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("`top_logprobs` is only allowed with `logprobs: true`")
        forced = self.turn.forced is not None
        if forced and self.form is not None:
            raise invalid(f"`{self.form_field}` and a `tool_choice` that forces a call cannot both be set")
        if forced and self.min_tokens:
            raise invalid("`min_tokens` cannot be set where a grammar decides when the answer may end")
        check_stream_fields(self)
        return self

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have, or None for what the context has left."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def turn(self) -> ChatTurn:
        """What is asked of the model."""
        return ChatTurn(
            messages=self.messages,
            param="messages",
            tools=self.tools or [],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            form=self.form,
            form_field=self.form_field,
            variables={"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking},
        )
