"""Reading a JSON body: declared as JSON, bounded while it arrives, decoded off the event loop if it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import TypeVar

import orjson
from starlette.requests import Request

from longreach.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError

T = TypeVar("T")

_LONG_BYTES = 64 * 1024
_UTF_8 = {"utf-8", "utf8"}  # RFC 8259, section 8.1


async def read_json(request: Request, parse: Callable[[object], T], limit: int) -> T:
    """Read at most `limit` bytes, decode them and `parse` the result.

    A long body is decoded and parsed in a thread. Both hold the GIL through most of their time, but as several shorter
    calls, between which the event loop gets its turn.

    Raises:
        MediaTypeError: the body is not declared as plain `application/json`.
        BodyTooLargeError: it is longer than `limit`; what follows is not read.
        InvalidRequestError: it is not JSON, or `parse` refused it.
    """
    _check_headers(request, limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLargeError(limit)
    if len(body) > _LONG_BYTES:
        return await asyncio.to_thread(_decode, body, parse)
    return _decode(body, parse)


def _decode(body: bytearray, parse: Callable[[object], T]) -> T:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    return parse(value)


def _check_headers(request: Request, limit: int) -> None:
    types = request.headers.getlist("content-type")
    if len(types) != 1 or types[0].partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeError(
            "The request needs the header `Content-Type: application/json`, once.", code="unsupported_media_type"
        )
    if not _charsets(types[0]) <= _UTF_8:
        raise MediaTypeError("JSON is UTF-8: leave the charset out of Content-Type.", code="unsupported_media_type")
    codings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    if any(coding.strip() not in ("", "identity") for coding in codings):
        raise MediaTypeError("Compressed request bodies are not supported.", code="unsupported_content_encoding")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise BodyTooLargeError(limit)


def _charsets(content_type: str) -> set[str]:
    """The values of all parameters `charset`, in lower case."""
    if ";" not in content_type:
        return set()
    message = Message()
    message["content-type"] = content_type
    named = message.get_params([], unquote=True)
    return {collapse_rfc2231_value(value).lower() for name, value in named if name.lower() == "charset"}
