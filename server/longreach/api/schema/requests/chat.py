"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.completions import check_stream_fields
from longreach.api.schema.requests.fields import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    invalid,
    or_default,
)
from longreach.api.schema.requests.formats import FormFields, ToolFields
from longreach.api.schema.requests.harmless import harmless
from longreach.api.schema.requests.sampling import ChoiceFields, SamplingFields
from longreach.api.schema.requests.template_fields import TemplateFields
from longreach.api.schema.requests.token_fields import UNLIMITED, Limit, TokenFields


class ChatRequest(SamplingFields, ChoiceFields, FormFields, ToolFields, TemplateFields, TokenFields, harmless("chat")):
    """Answer the last message of a chat."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, description="The chat so far.")
    max_completion_tokens: Limit = Field(None, description="By default, or with -1, whatever the context has left.")
    max_tokens: Limit = Field(None, description="The older name; `max_completion_tokens` goes before it.")
    logprobs: Annotated[bool, or_default(False)] = Field(False, description="Log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="So many of the likeliest tokens at each place; needs `logprobs`."
    )
    include_reasoning: Annotated[bool, or_default(True)] = Field(True, description="False: reasoning is not told.")
    separate_reasoning: Annotated[bool, or_default(True)] = Field(
        True, description="False: reasoning stays in the content, between the model's marks; not with `tools`."
    )

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        limit = self.limit
        if limit is not None and self.min_tokens > limit:
            raise invalid(f"`min_tokens` ({self.min_tokens}) is greater than `max_tokens` ({limit})")
        if self.top_logprobs and not self.logprobs:
            raise invalid("`top_logprobs` is only allowed with `logprobs: true`")
        forced = self.turn.forced is not None
        if forced and self.form is not None and self.form_field != "response_format":  # OpenAI lets the call win there
            raise invalid(f"`{self.form_field}` and a `tool_choice` that forces a call cannot both be set")
        if forced and self.min_tokens:
            raise invalid("`min_tokens` cannot be set where a grammar decides when the answer may end")
        if not self.separate_reasoning and self.turn.offered:
            raise invalid("`separate_reasoning` cannot be false with `tools`, whose calls are told apart as well")
        if not self.separate_reasoning and not self.tells_reasoning:
            raise invalid("`separate_reasoning` cannot be false where reasoning is not told (`include_reasoning`)")
        check_stream_fields(self)
        self.check_prompt_logprobs(self.stream)
        return self

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have, or None for what the context has left."""
        asked = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        first = next((limit for limit in asked if limit is not None), UNLIMITED)
        return None if first == UNLIMITED else first

    @property
    def tells_reasoning(self) -> bool:
        """Whether the caller is told the model's reasoning."""
        return self.include_reasoning and not (self.reasoning is not None and self.reasoning.exclude)

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
            variables=self.variables.values,
            variable_fields=self.variables.fields,
            opens_answer=self.opens_answer,
            continues=self.continues,
        )
