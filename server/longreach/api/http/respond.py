"""Answers that are one piece of JSON."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longreach.util.json_pieces import encoding, is_long
from longreach.util.work_pool import WorkPool


def json_response(value: object, status: int = 200) -> Response:
    """A msgspec object that is short, whatever was asked, as an answer."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def long_json_response(value: object, pool: WorkPool, caller: str) -> Response:
    """A msgspec object of any length as an answer; a long one is encoded in a thread of `pool`."""
    if not is_long(value):
        return json_response(value)
    return PiecesResponse(await pool.run(encoding(value), caller=caller))


class PiecesResponse(Response):
    """An answer in pieces, mostly of JSON, each of which is sent when the one before has left, and let go of then."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"content-length": str(sum(map(len, pieces)))})
        self._pieces = deque(pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer (ASGI)."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self._pieces:
            await send({"type": "http.response.body", "body": self._pieces.popleft(), "more_body": True})
            await asyncio.sleep(0)  # a quick reader would keep the event loop here
        await send({"type": "http.response.body", "body": b"", "more_body": False})
