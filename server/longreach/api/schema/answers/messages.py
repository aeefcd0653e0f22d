"""What `/v1/messages` answers: the message, its blocks, the events of its stream, and errors, in Anthropic's form."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from longreach.api.schema.answers.usage import AttentionUsage, CacheUsage, SentencePlaces

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Words."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning; the signature stands for its text where that is not shown."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A whole call; `input` is the JSON that the model wrote, to the character."""

    id: str
    name: str
    input: Any


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct, frozen=True):
    """Tokens of the answer that were reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens read and written. Of the prompt, `input_tokens` were computed, and the others came from the cache.
    `rope_factor` is that of the rotary frequencies, with `--rope auto`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    service_tier: Literal["standard", "batch"]
    attention: AttentionUsage | UnsetType = UNSET
    cache: CacheUsage | UnsetType = UNSET
    rope_factor: float | UnsetType = UNSET
    places: list[SentencePlaces] | UnsetType = UNSET


class MessageObject(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/messages`.

    `tools_left_out` has the kinds of tools that this server cannot run, and that the model was not told of.
    `context_management` is there where the request has one.
    """

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: dict[str, list[Any]] | UnsetType = UNSET
    tools_left_out: list[str] | UnsetType = UNSET


class MessageEvent(msgspec.Struct, frozen=True):
    """An event of the stream; it has the members that Anthropic gives to events of its type."""

    type: str


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/messages/count_tokens`. `context_management` is there where the request has one."""

    input_tokens: int
    context_management: dict[str, int] | UnsetType = UNSET


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model as Anthropic lists it; `created_at` is when the server started (RFC 3339)."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of models as Anthropic lists them."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnthropicErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field. The last four come with prompts that are too long."""

    type: str
    message: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_at_least: int | UnsetType = UNSET
    n_prompt_tokens_estimate: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Every refusal and failure under `/v1/messages`."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str
