"""What `/v1/requests/{key}` answers."""

from __future__ import annotations

from typing import Literal

import msgspec


class RequestAnswer(msgspec.Struct, frozen=True):
    """What the endpoint answers that the request was sent to, with its status."""


class DeletedAnswer(msgspec.Struct, frozen=True):
    """The request has ended, and its answer is no longer held."""

    id: str
    object: Literal["request"] = "request"
    deleted: bool = True
