"""What `/v1/responses` answers: the response, its items, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from longreach.api.schema.answers.error_body import ErrorObject
from longreach.api.schema.answers.usage import AttentionUsage, ServiceTier

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True):
    """Words."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, frozen=True):
    """Reasoning."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The assistant's message."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before it answered."""

    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]


Item = OutputMessage | ReasoningItem


class InputTokens(msgspec.Struct, frozen=True):
    """How many of the prompt's tokens came from the cache, and how many were computed and so written to it."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True):
    """Tokens of the answer that were reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    attention: AttentionUsage | msgspec.UnsetType = msgspec.UNSET


class Incomplete(msgspec.Struct, frozen=True):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseEvent(msgspec.Struct, frozen=True):
    """An event of the stream; beside these, it has the members that OpenAI gives to events of its type."""

    type: str
    sequence_number: int


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: ErrorObject | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    service_tier: ServiceTier | msgspec.UnsetType = msgspec.UNSET
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["auto", "none"] = "auto"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
