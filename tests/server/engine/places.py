"""Requests to an engine's client whose places are taken and given back as the API does it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from longreach.engine.admission import Place
from longreach.engine.client import EngineClient
from longreach.engine.messages import Generate
from longreach.engine.updates import Update


async def admitted(client: EngineClient, request: Generate) -> AsyncGenerator[Update, None]:
    """The updates of a request that takes its place when the first of them is wanted."""
    client.admit({request.request_id: Place(len(request.prompt))}, request.attention, request.caller)
    try:
        async with contextlib.aclosing(client.generate(request)) as updates:
            async for update in updates:
                yield update
    finally:
        client.release([request.request_id])
