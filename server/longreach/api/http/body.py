"""Reading a JSON body: declared as JSON, bounded while it arrives, and decoded off the event loop if it is long."""

from __future__ import annotations

from collections.abc import Mapping
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Any, Generic, TypeVar

import msgspec
import orjson
from pydantic import BaseModel
from starlette.requests import Request

from longreach.api.http.request_log import RequestRecord
from longreach.api.schema.requests.parse import parse
from longreach.api.schema.requests.typed_decoding import decode
from longreach.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError, OverloadedError
from longreach.util import exact_json
from longreach.util.shared_bytes import SharedBytes
from longreach.util.work_pool import WorkPool

M = TypeVar("M", bound=BaseModel)

_RETRY_AFTER_BODIES = 2


class Choice(Generic[M]):
    """Models of which a body is the first that has one of its members, or else `other`."""

    def __init__(self, models: Mapping[str, type[M]], other: type[M]) -> None:
        self._models = models
        self._other = other
        # What it does not name is skipped, however much it is.
        fields: list[Any] = [(f"m{i}", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for i in range(len(models))]
        names = {f"m{i}": name for i, name in enumerate(models)}
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Members", fields, rename=names))

    def of(self, body: bytes | bytearray) -> type[M]:
        """The model of a body; of one that is no JSON object, any."""
        try:
            members = self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return self._other
        given = zip(self._models, msgspec.structs.astuple(members), strict=True)
        return next((self._models[name] for name, raw in given if _is_there(raw)), self._other)


def _is_there(raw: msgspec.Raw | msgspec.UnsetType) -> bool:
    return raw is not msgspec.UNSET and bytes(raw) != b"null"


_LONG_BYTES = 64 * 1024
_UTF_8 = {"utf-8", "utf8"}  # RFC 8259, section 8.1


class HeldBody:
    """The bytes of a request's body that are in memory, which count towards `--max-total-body-bytes`.

    They do until the request has ended, unless whoever reads the body lets go of them.
    """

    def __init__(self, bodies: SharedBytes, record: RequestRecord) -> None:
        self._bodies = bodies
        self._record = record
        self._held = 0

    def add(self, size: int) -> None:
        """So many bytes more have come.

        Raises:
            OverloadedError: the bodies of all open requests take all that they may.
        """
        fits = self._bodies.fits(self._record.caller, size)
        self._held += size
        self._bodies.add(self._record.caller, size)
        if not fits:
            raise OverloadedError(
                "The server is busy: the bodies of its open requests take all the memory that they may.",
                retry_after=_RETRY_AFTER_BODIES,
                code="too_many_bytes",
            )

    def let_go(self, size: int) -> None:
        """So many of them are not needed any more."""
        assert size <= self._held, "they were not held"
        self._held -= size
        self._bodies.remove(self._record.caller, size)

    def close(self) -> None:
        """Let go of all."""
        self.let_go(self._held)


async def read_json(
    request: Request, model: type[M] | Choice[M], limit: int, most_tokens: int, pool: WorkPool, caller: str = ""
) -> tuple[M, bytearray]:
    """Read at most `limit` bytes and make a `model` of them, or the one of a choice; those bytes, too.

    A long body is decoded in a thread of `pool` by the types of its fields; see `schema.requests.typed_decoding`.

    Raises:
        MediaTypeError: the body is not declared as plain `application/json`.
        BodyTooLargeError: it is longer than `limit`; what follows is not read.
        InvalidRequestError: it is not JSON, or not what the model allows.
        ContextLengthError: a prompt has more than `most_tokens` token ids.
    """
    _check_headers(request, limit)
    body = await whole_body(request, limit)
    if len(body) <= _LONG_BYTES:
        return parse(_chosen(model, body), _loaded(body)), body
    return await pool.call(_decoded, model, body, most_tokens, caller=caller, size=len(body)), body


def _decoded(model: type[M] | Choice[M], body: bytearray, most_tokens: int) -> M:
    model = _chosen(model, body)
    return parse(model, decode(model, body, most_tokens))


def _chosen(model: type[M] | Choice[M], body: bytearray) -> type[M]:
    return model.of(body) if isinstance(model, Choice) else model


def _loaded(body: bytearray) -> object:
    try:
        return exact_json.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None


def _check_headers(request: Request, limit: int) -> None:
    if media_type(request) != "application/json":
        raise MediaTypeError(
            "The request needs the header `Content-Type: application/json`, once.", code="unsupported_media_type"
        )
    check_body(request, limit)


def media_type(request: Request) -> str | None:
    """What the body is declared as, in lower case; None where that is not said once."""
    types = request.headers.getlist("content-type")
    return types[0].partition(";")[0].strip().lower() if len(types) == 1 else None


def body_length(request: Request) -> int | None:
    """The bytes that the body is declared to have."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else None


async def whole_body(request: Request, limit: int) -> bytearray:
    """All bytes of a request's body.

    Raises:
        BodyTooLargeError: they are more than `limit`; what follows is not read.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLargeError(limit)
    return body


def check_body(request: Request, limit: int) -> None:
    """Check what is said of a body, whatever it is declared as.

    Raises:
        MediaTypeError: it is not UTF-8, or compressed.
        BodyTooLargeError: it is longer than `limit`.
    """
    if not _charsets(request.headers.get("content-type", "")) <= _UTF_8:
        raise MediaTypeError(
            "JSON and texts are UTF-8: leave the charset out of Content-Type.", code="unsupported_media_type"
        )
    codings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    if any(coding.strip() not in ("", "identity") for coding in codings):
        raise MediaTypeError("Compressed request bodies are not supported.", code="unsupported_content_encoding")
    if (body_length(request) or 0) > limit:
        raise BodyTooLargeError(limit)


def _charsets(content_type: str) -> set[str]:
    """The values of all parameters `charset`, in lower case."""
    if ";" not in content_type:
        return set()
    message = Message()
    message["content-type"] = content_type
    named = message.get_params([], unquote=True)
    return {collapse_rfc2231_value(value).lower() for name, value in named if name.lower() == "charset"}
