"""What `/v1/responses` answers: the response, its items, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from longreach.api.schema.answers.chat import TokenLogprob
from longreach.api.schema.answers.usage import AttentionUsage, CacheUsage, SentencePlaces, ServiceTier

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, frozen=True):
    """Words."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True):
    """Reasoning."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The assistant's message."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before it answered."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; the `arguments` of an incomplete one end where it was cut."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; the `input` of an incomplete one ends where it was cut."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


Item = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokens(msgspec.Struct, frozen=True):
    """How many of the prompt's tokens came from the cache, and how many were computed and so written to it."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True):
    """Tokens of the answer that were reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens read and written. `rope_factor` is that of the rotary frequencies, with `--rope auto`."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    attention: AttentionUsage | UnsetType = UNSET
    cache: CacheUsage | UnsetType = UNSET
    rope_factor: float | UnsetType = UNSET
    places: list[SentencePlaces] | UnsetType = UNSET


class Incomplete(msgspec.Struct, frozen=True):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseEvent(msgspec.Struct, frozen=True):
    """An event of the stream; beside these, it has the members that OpenAI gives to events of its type."""

    type: str
    sequence_number: int


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/responses`.

    `tools_left_out` has the types of tools that this server cannot run. The model was not told of them. `store` says
    whether the response is kept.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | UnsetType = UNSET
    reasoning: dict[str, str | None]
    safety_identifier: str | UnsetType = UNSET
    service_tier: ServiceTier | UnsetType = UNSET
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: list[Any] = []
    tools_left_out: list[str] | UnsetType = UNSET
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True):
    """The response is no longer kept."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct, frozen=True):
    """A page of the items of a response's own input."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokenCount(msgspec.Struct, frozen=True):
    """The tokens of the prompt that a response would read."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
