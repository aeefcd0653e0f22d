"""A text that is kept as a document while it comes: stored, tokenized and read ahead, part by part. Of a PDF it is the
text that is found in it.

What is read ahead is what requests with the document will begin with: of a chat, what its template writes before the
text, and then the text. Special tokens in the text are text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field

from longreach.api.http.race import race
from longreach.api.http.request_log import RequestRecord
from longreach.api.schema.requests.chat_messages import Message
from longreach.api.service.file_text import Incoming, opened
from longreach.api.service.service import Service
from longreach.documents.document import Document, NewDocument
from longreach.documents.documents import DocumentWriter
from longreach.documents.plain_text import NotTextError, TextDecoder
from longreach.documents.read_ahead import ReadAhead
from longreach.documents.text_pipeline import TextPipeline
from longreach.documents.wrapping import closing, opening
from longreach.errors import BodyTooLargeError, ContextLengthError, InvalidRequestError
from longreach.text.growing_text import GrowingText
from longreach.text.tokenizer import TooManyTokensError, UnbrokenTextError

# What is gathered before it is stored.
_STORED_BYTES = 256 * 1024


async def upload_text(
    service: Service, record: RequestRecord, new: NewDocument, incoming: Incoming
) -> tuple[Document, bool]:
    """Keep a text that comes in chunks as the document `new`: what is kept, and whether it is new.

    The engine reads it meanwhile. What it has not read by the text's end it reads in the background. If this is
    cancelled or fails nothing is kept.

    Raises:
        ApiError: it is no text, has too many bytes or tokens, or there is no room for it.
        ClientDisconnect: its sender has gone.
    """
    writer = await service.documents.begin(record.owner, new)
    with service.uploads.going_on(writer.document.id) as upload:
        try:
            document, is_new = await _Upload(service, record, writer, incoming).run()
        finally:
            await asyncio.shield(writer.drop())
        upload.kept_as = document.id
    return document, is_new


@dataclass(frozen=True)
class _Around:
    """What stands around the text in the prompts that begin with a document.

    Attributes:
        first: token ids before everything.
        before: text between these and the document's, with its special tokens.
        behind: text that always follows; None where nothing does that is encoded with the document's.
        special: the tokenizer puts tokens around it all.
        is_known: the prompts do begin so; else nothing can be read before there is one.
    """

    first: list[int] = field(default_factory=list)
    before: str = ""
    behind: str | None = None
    special: bool = False
    is_known: bool = True


class _Upload:
    """One text while it comes."""

    def __init__(self, service: Service, record: RequestRecord, writer: DocumentWriter, incoming: Incoming) -> None:
        self._service = service
        self._record = record
        self._caller = record.caller
        self._writer = writer
        self._document = writer.document
        self._incoming = incoming
        self._engine, self._tokenizer = service.require_ready()
        self._limit = service.settings.body_limit(self._engine.info.max_model_len)
        self._bytes = 0
        self._unstored = bytearray()
        self._held = 0  # bytes that came and are not stored

    async def run(self) -> tuple[Document, bool]:
        """Take all of it."""
        self._incoming = await opened(self._service, self._record, self._incoming, self._document.name)
        around = await self._around()
        try:
            return await self._run(around)
        except NotTextError as error:
            raise self._invalid(f"{error}.", "not_text") from None
        except UnbrokenTextError as error:
            raise self._invalid(f"{error}.", "unbroken_text") from None
        except TooManyTokensError as error:
            raise self._too_long(error, len(around.first)) from None

    async def _run(self, around: _Around) -> tuple[Document, bool]:
        service, document = self._service, self._document
        most = self._engine.info.max_model_len - 1 - len(around.first)
        text = GrowingText(self._tokenizer, around.special, most=most)
        async with contextlib.AsyncExitStack() as stack:
            ahead = None
            if service.settings.prefix_cache and around.is_known:
                policy = service.settings.default_policy if document.attention is None else document.attention
                ahead = await stack.enter_async_context(
                    ReadAhead(
                        service, attention=policy, cache_salt=document.salt, caller=self._caller, name=document.id
                    )
                )
                ahead.feed(around.first)
            pipeline = await stack.enter_async_context(
                TextPipeline(text, service.encoding, caller=self._caller, ahead=ahead)
            )
            await race(self._receive(pipeline, around, ahead), pipeline.failed())
            beginning = await pipeline.settle()
            last = await pipeline.last()
            prefix = [*around.first, *pipeline.ids, *(last if around.behind is None else ())]
            kept, is_new = await self._writer.finish(len(prefix) if around.is_known else None)
            if beginning is not None and around.is_known:
                service.beginnings.keep(kept.id, beginning)
        # What was not read by now is read as any document is, unless a question comes first.
        service.document_reader.read(kept, prefix if around.is_known and beginning is not None else None)
        return kept, is_new

    async def _receive(self, pipeline: TextPipeline, around: _Around, ahead: ReadAhead | None) -> None:
        decoder = TextDecoder(self._document.name, self._incoming.media_type)
        guard = None if around.behind is None else self._tokenizer.marks.growing_guard()
        if guard is None:
            await pipeline.feed(around.before)
        else:
            await pipeline.feed(around.before + guard.feed(opening(self._document.name)))
        is_empty = True
        async for chunk in self._incoming.chunks:
            self._bytes += len(chunk)
            if self._bytes > self._limit:
                raise BodyTooLargeError(self._limit)
            text = decoder.feed(chunk)
            is_empty = is_empty and not text
            await self._store(text, len(chunk))
            await pipeline.feed(text if guard is None else guard.feed(text))
            if ahead is not None and self._incoming.length is not None and self._bytes:
                ahead.expect(round(ahead.fed_tokens * max(1.0, self._incoming.length / self._bytes)))
        text = decoder.end()
        if is_empty and not text:
            raise self._invalid("there is no text in it.", "invalid_value")
        await self._store(text, 0, is_last=True)
        await pipeline.feed(text if guard is None else guard.feed(text + (around.behind or "")))

    async def _store(self, text: str, came: int, *, is_last: bool = False) -> None:
        self._unstored += text.encode()
        self._held += came
        if len(self._unstored) >= _STORED_BYTES or is_last:
            if self._unstored:
                await self._writer.add(bytes(self._unstored))
            self._unstored.clear()
            self._incoming.let_go(self._held)
            self._held = 0

    async def _around(self) -> _Around:
        if self._document.use == "completion":
            around = self._tokenizer.around
            return _Around(special=True) if around is None else _Around(first=around[0])
        chat, name = self._service.chat, self._document.name
        stand_in = secrets.token_hex(16)
        messages = [Message(role="user", content=opening(name) + stand_in + closing())]

        def write() -> str:
            return chat.text(messages, [], self._tokenizer.marks, add_generation_prompt=True, variables={})[0]

        prompt = await self._service.reading.call(write, caller=self._caller)
        shown = self._tokenizer.marks.growing_guard().feed(opening(name))
        before, found, _ = prompt.partition(shown + stand_in)
        return _Around(before=before, behind=closing(), special=chat.template.is_default, is_known=bool(found))

    def _too_long(self, error: TooManyTokensError, first: int) -> ContextLengthError:
        length, tokens = self._incoming.length, first + error.tokens
        estimate = error.estimate
        if length is not None and 0 < self._bytes < length:
            estimate = round(error.tokens * length / self._bytes)
        return ContextLengthError(
            tokens,
            1,
            self._engine.info.max_model_len,
            param=self._incoming.param,
            at_least=not error.exact,
            estimate=None if estimate is None else first + estimate,
        )

    def _invalid(self, why: str, code: str) -> InvalidRequestError:
        param = self._incoming.param
        return InvalidRequestError(f"`{param}`: {why}", param=param, code=code)
