"""`/v1/files`: kept texts as OpenAI's files, or as Anthropic's for requests with the header `anthropic-version`.

A file is a document of the kind text, and a document of that kind is a file: both are in one store, under one id whose
prefix is `file-` here and `doc-` there. Either is taken in both places.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.http.error_forms import speaks_anthropic
from longreach.api.http.multipart import MultipartReader
from longreach.api.http.race import race
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import PiecesResponse, json_response, long_json_response
from longreach.api.schema.answers.files import (
    DeletedFile,
    FileDeletion,
    FileList,
    FileMetadataPage,
    FileObject,
    file_metadata,
    file_object,
)
from longreach.api.schema.requests.files import FILE, FileForm, file_document
from longreach.api.service.document_upload import upload_text
from longreach.api.service.file_text import Incoming
from longreach.api.service.loaded_document import load_document
from longreach.api.service.service import Service
from longreach.documents.document import Document, file_id
from longreach.documents.documents import Documents
from longreach.documents.errors import DocumentNotFoundError
from longreach.errors import InvalidRequestError, MediaTypeError, quoted

router = APIRouter()

_REFUSALS = ("400", "401", "404", "500", "503")
_FIELD_BYTES = 256
_MAX_FIELDS = 16
_MOST_LISTED, _MOST_OF_ANTHROPICS, _FEW = 10_000, 1000, 20
_PIECE_BYTES = 1 << 18
_CONTENT = documented(None, FileObject, refusals=_REFUSALS)
_CONTENT["openapi_extra"]["responses"]["200"] = {
    "description": "The text of the file.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
Order = Literal["asc", "desc"]


@router.post("/v1/files", **documented(FileForm, FileObject, media_type="multipart/form-data"))
async def create_file(request: Request) -> Response:
    """Keep a text file or a PDF for later requests, whose messages name it by its id. The engine reads a text while it
    comes.

    One that is kept already under this name, with the same contents, is not kept twice.
    """
    service, record = _of(request)
    service.require_ready()
    types = request.headers.getlist("content-type")
    if len(types) != 1:
        raise MediaTypeError("The request needs one Content-Type.", code="unsupported_media_type")
    document = await _received(service, record, request, MultipartReader(types[0], request.stream()))
    record.reads_document(document.id)
    return json_response(file_metadata(document) if speaks_anthropic(request.scope) else file_object(document))


async def _received(service: Service, record: RequestRecord, request: Request, reader: MultipartReader) -> Document:
    """The file of a form, kept; nothing is kept of a form that is wrong."""
    use = "completion" if service.chat.template.is_default else "chat"
    fields: dict[str, str] = {}
    document, is_new, head, new = None, False, None, None
    try:
        while (part := await reader.next_part()) is not None:
            if part.name in fields or (part.name == FILE and document is not None) or len(fields) == _MAX_FIELDS:
                raise _refused(part.name, "is given twice, or is one of too many fields", "invalid_value")
            if part.name != FILE:
                fields[part.name] = await reader.value(_FIELD_BYTES)
                continue
            if not part.filename:
                raise _refused(FILE, "must be a file with a name", "invalid_type")
            head, new = part, file_document(fields, part.filename, part.media_type, use)
            held = request.state.held_body
            incoming = Incoming(reader.chunks(), part.media_type, let_go=held.let_go, param=FILE)
            document, is_new = await race(upload_text(service, record, new, incoming), service.until_cut())
        if "purpose" not in fields and not speaks_anthropic(request.scope):
            raise _refused("purpose", "is required: `user_data`", "missing_required_parameter")
        if document is None or head is None:
            raise _refused(FILE, "is required", "missing_required_parameter")
        asked = file_document(fields, head.filename, head.media_type, use)  # fields may stand behind the file
        if asked != new:
            document = await service.documents.change(document, asked)
    except BaseException:
        if document is not None and is_new:
            await service.documents.delete(record.owner, document.id)
        raise
    return document


@router.get("/v1/files", **documented(None, FileList, refusals=_REFUSALS))
async def list_files(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=_MOST_LISTED, description="Files of a page.")] = _MOST_LISTED,
    order: Annotated[Order, Query(description="desc: the newest first.")] = "desc",
    after: Annotated[str | None, Query(max_length=256, description="The id of the file before the page.")] = None,
    purpose: Annotated[str | None, Query(max_length=64, description="Only files with this purpose.")] = None,
) -> Response:
    """The files that are kept for this key. Anthropic's parameters are `limit`, `after_id` and `before_id`."""
    service, record = _of(request)
    if speaks_anthropic(request.scope):
        listed: Any = await _anthropics_page(service.documents, record.owner, request.query_params)
    else:
        found, more = await _files(service.documents, record.owner, limit, order, after, purpose)
        told = [file_object(document) for document in found]
        listed = FileList(told, *_ends(told), more)
    return await long_json_response(listed, service.writing, record.caller)


@router.get("/v1/files/{file_id}", **documented(None, FileObject, refusals=_REFUSALS))
async def retrieve_file(request: Request, file_id: str) -> Response:
    """A file that is kept."""
    service, record = _of(request)
    document = await _text(service.documents, record.owner, file_id)
    record.reads_document(document.id)
    return json_response(file_metadata(document) if speaks_anthropic(request.scope) else file_object(document))


@router.get("/v1/files/{file_id}/content", **_CONTENT)
async def retrieve_content(request: Request, file_id: str) -> Response:
    """The text of a file, in UTF-8."""
    service, record = _of(request)
    await _text(service.documents, record.owner, file_id)
    loaded = await load_document(service, record, file_id, "file_id")
    body = await service.reading.call(loaded.text.encode, caller=record.caller)
    pieces = [body[start : start + _PIECE_BYTES] for start in range(0, len(body), _PIECE_BYTES)]
    return FileContent(pieces)


@router.delete("/v1/files/{file_id}", **documented(None, DeletedFile, refusals=_REFUSALS))
async def delete_file(request: Request, file_id: str) -> Response:
    """Let go of a file. What requests have read of it already stays with them."""
    service, record = _of(request)
    document = await _text(service.documents, record.owner, file_id)
    await service.documents.delete(record.owner, document.id)
    record.reads_document(document.id)
    return json_response(_deleted(document, speaks_anthropic(request.scope)))


def _deleted(document: Document, is_anthropic: bool) -> DeletedFile | FileDeletion:
    return FileDeletion(file_id(document.id)) if is_anthropic else DeletedFile(file_id(document.id))


class FileContent(PiecesResponse):
    """Somebody's text: whatever it says, no browser is to run it as a page of this server."""

    media_type = "text/plain; charset=utf-8"

    def init_headers(self, headers: Any = None) -> None:
        """As `Response.init_headers`."""
        own = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        super().init_headers({**(headers or {}), **own})


async def _files(
    documents: Documents, owner: str, limit: int, order: Order, after: str | None, purpose: str | None = None
) -> tuple[list[Document], bool]:
    """So many files behind the one with the id `after`, and whether more follow."""
    found: list[Document] = []
    while True:
        page = await documents.page(owner, limit + 1, order, after)
        for document in page.documents:
            kept = document.metadata.get("purpose", "user_data")
            if document.kind == "text" and purpose in (None, kept):
                found.append(document)
        if len(found) > limit or not page.more:
            return found[:limit], len(found) > limit
        after = page.documents[-1].id


async def _anthropics_page(documents: Documents, owner: str, query: QueryParams) -> FileMetadataPage:
    """A page as Anthropic's clients ask for it: of the newest, or behind `after_id`, or before `before_id`.

    Raises:
        InvalidRequestError: a parameter is wrong.
    """
    given = query.get("limit", str(_FEW))
    if not (given.isascii() and given.isdecimal() and len(given) < 8 and 1 <= int(given) <= _MOST_OF_ANTHROPICS):
        raise _refused(
            "limit", f"must be an integer from 1 to {_MOST_OF_ANTHROPICS}, got {quoted(given)}", "invalid_value"
        )
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise _refused("before_id", "cannot be set together with `after_id`", "invalid_value")
    if before is not None:
        found, more = await _files(documents, owner, int(given), "asc", before)
        found.reverse()
    else:
        found, more = await _files(documents, owner, int(given), "desc", after)
    told = [file_metadata(document) for document in found]
    first, last = _ends(told)
    return FileMetadataPage(told, more, first, last)


def _ends(told: list[Any]) -> tuple[str | None, str | None]:
    return (told[0].id, told[-1].id) if told else (None, None)


async def _text(documents: Documents, owner: str, file_id: str) -> Document:
    """The text with this id.

    Raises:
        DocumentNotFoundError: this owner has no such text.
    """
    document = await documents.get(owner, file_id)
    if document.kind != "text":
        raise DocumentNotFoundError(file_id)
    return document


def _of(request: Request) -> tuple[Service, RequestRecord]:
    return request.app.state.service, request.state.record


def _refused(param: str, why: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param[:64]}` {why}.", param=param[:64], code=code)
