"""What every refusal and failure answers: OpenAI's error object."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field.

    Numbers of tokens come with `context_length_exceeded`. The deadline comes with `deadline_exceeded`, and with
    `deadline_cannot_be_met`, which has the predictions, too: in the present queue, and without one.
    """

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_at_least: int | UnsetType = UNSET
    n_prompt_tokens_estimate: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET
    deadline_ms: int | UnsetType = UNSET
    predicted_ms: int | UnsetType = UNSET
    predicted_alone_ms: int | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """Every refusal and failure."""

    error: ErrorObject
