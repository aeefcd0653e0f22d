"""What `POST /v1/estimate` answers."""

from __future__ import annotations

from typing import Literal

import msgspec


class EstimatedTiers(msgspec.Struct, frozen=True):
    """What would be taken from each cache now: from the device's memory, from host memory, and from disk."""

    gpu: int
    host: int
    disk: int


class EstimatedSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted seconds to the first token, from when the prompt is queued: null while nothing is known of what steps
    cost.

    `now` is in the present queue and beside the answers that are being written, `alone` on an idle server. `whole` is
    `alone` without anything cached, and `dense` the same under exact attention.
    """

    now: float | None
    alone: float | None
    whole: float | None
    dense: float | None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would get if it were sent now. Of several prompts: their sums, and the time to the last one's
    first token. Equal prompts count once.

    Its answers together would hold `kv_bytes` of the KV cache; `fits_now` says whether that is free, and `queue_full`
    whether the request would be refused with `queue_full`. Prompts of `requests_ahead` are read first. `policy` is the
    attention policy in its short form. `meets_deadline` is null without `deadline_ms`, or where nothing is predicted.
    """

    object: Literal["estimate"] = "estimate"
    model: str
    prompt_tokens: int
    cached_tokens: EstimatedTiers
    cached_bytes: EstimatedTiers
    kv_bytes: int
    fits_now: bool
    queue_full: bool
    requests_ahead: int
    seconds: EstimatedSeconds
    policy: str
    meets_deadline: bool | None
