"""What `/v1/completions` answers: OpenAI's objects, once for the wire and for the schema.

A member that is `UNSET` is left out; `service_tier` is there where the request names one.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from longreach.api.schema.answers.usage import FinishReason, PromptLogprobs, PromptProgress, ServiceTier, Usage


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Tokens as text, where in the text they begin, their log-probabilities, and the likeliest at each place."""

    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text; the last three members are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/completions`, whole or a chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: ServiceTier | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
