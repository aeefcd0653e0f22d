"""A response's object, wherever it is: being made, or kept."""

from __future__ import annotations

from typing import Any

import msgspec

from longreach.api.schema.answers.responses import ResponseFailure
from longreach.api.service.service import Service

_UNFINISHED = ("queued", "in_progress")
_LOST = ResponseFailure("server_error", "The server could not keep the end of this response.")


async def kept_object(service: Service, owner: str, response_id: str) -> dict[str, Any] | None:
    """The response's JSON object; None if there is none of this owner.

    Raises:
        UnavailableError: the store cannot be read.
    """
    if not service.kept.enabled:
        return None
    if (running := _running(service, owner, response_id)) is not None:
        return running
    kept = await service.kept.get(owner, response_id)
    if kept is None or kept.body["status"] not in _UNFINISHED:
        return None if kept is None else kept.whole
    # It has begun since, or ended. If neither, its last state could not be written.
    if (running := _running(service, owner, response_id)) is not None:
        return running
    kept = await service.kept.get(owner, response_id)
    if kept is None or kept.body["status"] not in _UNFINISHED:
        return None if kept is None else kept.whole
    return {**kept.whole, "status": "failed", "error": msgspec.to_builtins(_LOST)}


def _running(service: Service, owner: str, response_id: str) -> dict[str, Any] | None:
    run = service.background.running(owner, response_id)
    return None if run is None else msgspec.to_builtins(run.snapshot())
