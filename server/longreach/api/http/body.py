"""Reading a JSON body: declared as JSON, bounded while it arrives, and decoded off the event loop if it is long."""

from __future__ import annotations

from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import TypeVar

import orjson
from pydantic import BaseModel
from starlette.requests import Request

from longreach.api.schema.requests.parse import parse
from longreach.api.schema.requests.typed_decoding import decode
from longreach.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError
from longreach.util import exact_json
from longreach.util.work_pool import WorkPool

M = TypeVar("M", bound=BaseModel)

_LONG_BYTES = 64 * 1024
_UTF_8 = {"utf-8", "utf8"}  # RFC 8259, section 8.1


async def read_json(
    request: Request, model: type[M], limit: int, most_tokens: int, pool: WorkPool, caller: str = ""
) -> tuple[M, bytearray]:
    """Read at most `limit` bytes and make a `model` of them; those bytes, too.

    A long body is decoded in a thread of `pool` by the types of its fields; see `schema.requests.typed_decoding`.

    Raises:
        MediaTypeError: the body is not declared as plain `application/json`.
        BodyTooLargeError: it is longer than `limit`; what follows is not read.
        InvalidRequestError: it is not JSON, or not what the model allows.
        ContextLengthError: a prompt has more than `most_tokens` token ids.
    """
    _check_headers(request, limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLargeError(limit)
    if len(body) <= _LONG_BYTES:
        return parse(model, _loaded(body)), body
    return await pool.call(_decoded, model, body, most_tokens, caller=caller, size=len(body)), body


def _decoded(model: type[M], body: bytearray, most_tokens: int) -> M:
    return parse(model, decode(model, body, most_tokens))


def _loaded(body: bytearray) -> object:
    try:
        return exact_json.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None


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
