"""What the small endpoints answer: the models, the server's phase and its version."""

from __future__ import annotations

from typing import Literal

import msgspec


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The sampling fields that a request has where it does not name them; `top_k` 0 means no limit."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class RopeTableInfo(msgspec.Struct, frozen=True):
    """Rotary frequencies for `max_tokens` of prompt and answer together; `factor` 1 is the native ones."""

    factor: float
    max_tokens: int


class Model(msgspec.Struct, frozen=True):
    """A served model under one of its names; `max_model_len` is the context that really fits, prompt and answer.

    `description` says what the embedded model can do, in a line for people; of other models it is None.
    `sampling_defaults` are those of requests without `generation_config`. `quantization` names the formats of quantised
    weights, None for 16 or 32 bits; `weight_bytes` is what the weights take on one device. `rope_tables` are the rotary
    frequencies that requests choose from by `rope`, with `--rope auto`; otherwise None.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    description: str | None
    sampling_defaults: SamplingDefaults
    quantization: str | None
    weight_bytes: int
    rope_tables: list[RopeTableInfo] | None


class ModelList(msgspec.Struct, frozen=True):
    """All served models."""

    object: Literal["list"]
    data: list[Model]


class Status(msgspec.Struct, frozen=True):
    """Where the server is in its life."""

    status: Literal["loading", "ready", "stalled", "restarting", "draining", "dead"]


class Version(msgspec.Struct, frozen=True):
    """The server's version."""

    version: str
