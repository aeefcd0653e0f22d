"""Answers that are one piece of JSON."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def json_response(value: object, status: int = 200) -> Response:
    """A msgspec object as an answer."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
