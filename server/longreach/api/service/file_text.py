"""The text of a file that comes in chunks, whatever kind of file it is: a PDF is read whole first, text as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from longreach.api.http.race import race
from longreach.api.http.request_log import RequestRecord
from longreach.api.service.service import Service
from longreach.documents.pdf import MARK, PdfError, PdfText, is_pdf
from longreach.errors import BodyTooLargeError, InvalidRequestError, quoted

_PIECE_CHARACTERS = 64 * 1024


def _nothing(size: int) -> None:
    del size


@dataclass(frozen=True)
class Incoming:
    """A file on its way.

    Attributes:
        chunks: its bytes, as they come.
        media_type: what its sender says that it is.
        length: how many bytes there will be, if that is known.
        let_go: called with numbers of bytes that need not be held any more.
        param: the field that it comes in.
    """

    chunks: AsyncIterator[bytes]
    media_type: str | None = None
    length: int | None = None
    let_go: Callable[[int], None] = _nothing
    param: str = "text"


async def opened(service: Service, record: RequestRecord, incoming: Incoming, name: str | None) -> Incoming:
    """The file as text on its way: a PDF's text, which is all there, or the file itself.

    Raises:
        ApiError: it is a PDF that cannot be read.
    """
    head = b""
    async for chunk in incoming.chunks:
        head += chunk
        if len(head) >= len(MARK):
            break
    if not is_pdf(head, incoming.media_type):
        return replace(incoming, chunks=_chained(head, incoming.chunks))
    found = await read_incoming_pdf(service, record, replace(incoming, chunks=_chained(head, incoming.chunks)), name)
    return Incoming(_pieces(found.text), length=len(found.text.encode()), param=incoming.param)


async def read_incoming_pdf(service: Service, record: RequestRecord, incoming: Incoming, name: str | None) -> PdfText:
    """The text of a PDF once all of it has come.

    Raises:
        ApiError: it cannot be read.
    """
    engine, _ = service.require_ready()
    limit, data = service.settings.file_limit(engine.info.max_model_len), bytearray()
    async for chunk in incoming.chunks:
        data += chunk
        if len(data) > limit:
            raise BodyTooLargeError(limit)
    found = await read_pdf(service, record, bytes(data), name, incoming.param)
    incoming.let_go(len(data))
    return found


async def read_pdf(service: Service, record: RequestRecord, data: bytes, name: str | None, param: str) -> PdfText:
    """The text of a PDF that came with a request; errors name the field `param`.

    Raises:
        InvalidRequestError: it cannot be read.
        ApiError: as `PdfReader.read`.
    """
    engine, _ = service.require_ready()
    most = service.settings.body_limit(engine.info.max_model_len)
    try:
        reading = service.pdfs.read(data, most, owner=record.owner, caller=record.caller)
        return await race(reading, service.until_cut())
    except PdfError as error:
        shown = quoted(name) if name else "the file"
        raise InvalidRequestError(f"`{param}`: {shown} {error}.", param=param, code=error.code) from None


async def _chained(head: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if head:
        yield head
    async for chunk in rest:
        yield chunk


async def _pieces(text: str) -> AsyncIterator[bytes]:
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield text[start : start + _PIECE_CHARACTERS].encode()
