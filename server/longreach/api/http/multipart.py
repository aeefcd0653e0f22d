"""Bodies of `multipart/form-data` (RFC 7578), part by part as they come: a long file is never held whole."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from email.message import Message

from longreach.errors import InvalidRequestError, MediaTypeError

_MAX_HEAD_BYTES = 8192
_MAX_PADDING_BYTES = 256
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")  # RFC 2046, section 5.1.1
_PARAMETER = re.compile(r';\s*([A-Za-z*]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;"]*)')
_ESCAPED = re.compile(r'\\(["\\])')
# How browsers write what would end a quoted string or a line.
_PERCENT = {"%22": '"', "%0D": "\r", "%0A": "\n"}


@dataclass(frozen=True)
class PartHead:
    """What a part says of itself; `filename` and `media_type` are None where it does not."""

    name: str
    filename: str | None = None
    media_type: str | None = None


class MultipartReader:
    """Reads the parts of one body, in their order: `next_part`, and then `chunks` or `value` of it.

    Arguments:
        content_type: the header's value.
        stream: the body.

    Raises:
        MediaTypeError: the header names no such body.
    """

    def __init__(self, content_type: str, stream: AsyncIterator[bytes]) -> None:
        header = Message()
        header["content-type"] = content_type
        boundary = header.get_boundary("")
        if header.get_content_type() != "multipart/form-data" or _BOUNDARY.fullmatch(boundary) is None:
            raise MediaTypeError(
                "A file is sent as `Content-Type: multipart/form-data` with a boundary.", code="unsupported_media_type"
            )
        self._delimiter = b"\r\n--" + boundary.encode("ascii")
        self._stream = stream
        # The first delimiter may stand at the very beginning.
        self._buffer = bytearray(b"\r\n")
        self._in_part = True  # what stands before the first delimiter is skipped as a part is

    async def next_part(self) -> PartHead | None:
        """The head of the next part, after whatever is left of the last one; None at the end.

        Raises:
            InvalidRequestError: this is no such body.
        """
        async for _ in self.chunks():
            pass
        while len(self._buffer) < 2:
            await self._more()
        if self._buffer.startswith(b"--"):
            return None
        if (await self._until(b"\r\n", _MAX_PADDING_BYTES)).strip(b" \t"):
            raise _malformed("something stands behind a boundary")
        head = await self._until(b"\r\n\r\n", _MAX_HEAD_BYTES)
        self._in_part = True
        return _parsed(head)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The contents of the part, as they come.

        Raises:
            InvalidRequestError: the body ends before the part does.
        """
        keep = len(self._delimiter) - 1
        while self._in_part:
            at = self._buffer.find(self._delimiter)
            self._in_part = at < 0
            end = at if at >= 0 else max(len(self._buffer) - keep, 0)
            piece = bytes(self._buffer[:end])
            del self._buffer[: end if at < 0 else end + len(self._delimiter)]
            if piece:
                yield piece
            if self._in_part:
                await self._more()

    async def value(self, most: int) -> str:
        """The contents of a part that is a short text.

        Raises:
            InvalidRequestError: it has more than `most` bytes, or is no UTF-8.
        """
        found = bytearray()
        async for piece in self.chunks():
            found += piece
            if len(found) > most:
                raise _malformed(f"a field has more than {most} bytes")
        try:
            return found.decode()
        except UnicodeDecodeError:
            raise _malformed("a field is no UTF-8") from None

    async def _until(self, end: bytes, most: int) -> bytes:
        while (at := self._buffer.find(end)) < 0:
            if len(self._buffer) > most:
                raise _malformed(f"the head of a part has more than {most} bytes")
            await self._more()
        line = bytes(self._buffer[:at])
        del self._buffer[: at + len(end)]
        return line

    async def _more(self) -> None:
        try:
            self._buffer += await anext(self._stream)
        except StopAsyncIteration:
            raise _malformed("it ends before its last boundary") from None


def _parsed(head: bytes) -> PartHead:
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError:
        raise _malformed("the head of a part is no UTF-8") from None
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kind, _, _ = headers.get("content-disposition", "").partition(";")
    parameters = {
        name.lower(): _unquoted(value) for name, value in _PARAMETER.findall(headers.get("content-disposition", ""))
    }
    if kind.strip().lower() != "form-data" or "name" not in parameters:
        raise _malformed("a part has no `Content-Disposition: form-data` with a name")
    if headers.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        raise _malformed("a part has a Content-Transfer-Encoding, which RFC 7578 does not allow")
    return PartHead(parameters["name"], parameters.get("filename"), headers.get("content-type"))


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value.strip()
    text = _ESCAPED.sub(r"\1", value[1:-1])
    for written, character in _PERCENT.items():
        text = text.replace(written, character)
    return text


def _malformed(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body is no valid multipart/form-data: {why}.", code="invalid_multipart")
