"""A response's object, wherever it is: being made, or kept."""

from __future__ import annotations

from typing import Any

import msgspec

from longreach.api.schema.answers.responses import ResponseFailure
from longreach.api.service.service import Service

_LOST = ResponseFailure("server_error", "The server could not keep the end of this response.")


async def kept_object(service: Service, owner: str, response_id: str) -> dict[str, Any] | None:
    """The response's JSON object; None if there is none of this owner.

    Raises:
        UnavailableError: the store cannot be read.
    """
    if not service.kept.enabled:
        return None
    run = service.background.running(owner, response_id)
    if run is not None:
        return msgspec.to_builtins(run.snapshot())
    kept = await service.kept.get(owner, response_id)
    if kept is None:
        return None
    whole = kept.whole
    if whole["status"] in ("queued", "in_progress"):
        # It may have ended between the two looks. If not, its last state could not be written.
        again = await service.kept.get(owner, response_id)
        whole = whole if again is None else again.whole
        if whole["status"] in ("queued", "in_progress"):
            return {**whole, "status": "failed", "error": msgspec.to_builtins(_LOST)}
    return whole
