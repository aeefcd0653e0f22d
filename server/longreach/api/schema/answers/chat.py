"""What `/v1/chat/completions` answers: OpenAI's objects, once for the wire and for the schema.

A member that is `UNSET` is left out; `reasoning_content` is DeepSeek's name of what vLLM calls `reasoning`;
`token_ids`, `prompt_token_ids` and `prompt_logprobs` are vLLM's.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from longreach.api.schema.answers.usage import FinishReason, PromptLogprobs, PromptProgress, ServiceTier, Usage


class TopLogprob(msgspec.Struct, frozen=True):
    """A token, its bytes, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer, and the likeliest at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the answer's tokens, in the order they were drawn."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A function's name and its arguments, a JSON object in a string; in a chunk, a piece of it."""

    arguments: str
    name: str | UnsetType = UNSET


class ChatToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a function; in a chunk with the call's `index`, and with id and type in the first of each call."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: ServiceTier | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: ServiceTier | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
