"""A response's object, wherever it is: being made, or kept."""

from __future__ import annotations

from typing import Any

import msgspec

from longreach.api.schema.answers.responses import ResponseFailure
from longreach.api.service.kept_responses import as_object
from longreach.api.service.service import Service
from longreach.api.service.unfinished import UNFINISHED, Unfinished

_LOST = ResponseFailure("server_error", "The server could not keep the end of this response.")


async def kept_object(service: Service, owner: str, response_id: str) -> dict[str, Any] | None:
    """The response's JSON object; None if there is none of this owner.

    Raises:
        UnavailableError: the store cannot be read.
    """
    if not service.kept.enabled:
        return None
    kept = None
    for _ in range(2):  # it may begin or end between a look at those that are being made and one at those kept
        run = service.background.running(owner, response_id)
        if run is not None:
            return as_object(run.snapshot())
        kept = await service.kept.get(owner, response_id)
        if kept is None:
            return None
        if kept.body["status"] not in UNFINISHED:
            return kept.whole
        if Unfinished(owner, response_id) in service.kept.waiting:
            return {**kept.whole, "status": "queued", "output": []}
    # It is not being made, and its last state could not be written.
    return None if kept is None else {**kept.whole, "status": "failed", "error": msgspec.to_builtins(_LOST)}
