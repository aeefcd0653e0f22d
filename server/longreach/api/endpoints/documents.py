"""`/v1/documents`: texts that are kept for later prompts, and read into the prefix cache before anybody asks.

Another key's document is not found, as if there were none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.document_uploads import create_from_file, declares_file, new_document
from longreach.api.endpoints.receive import receive
from longreach.api.generation.plan_answers import check_bounds, check_token_ids
from longreach.api.http.body import read_json
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import json_response, long_json_response
from longreach.api.schema.answers.documents import (
    DeletedDocument,
    DocumentList,
    DocumentObject,
    document_cache,
    document_object,
)
from longreach.api.schema.requests.documents import DocumentChange, DocumentRequest
from longreach.api.schema.requests.file_parts import named_files
from longreach.api.service.call import Call
from longreach.api.service.document_prompt import prefix_of
from longreach.api.service.encode import TextEncoder
from longreach.api.service.loaded_document import LoadedDocument, packed_token_ids
from longreach.api.service.service import Service
from longreach.errors import InvalidRequestError
from longreach.policies.schemas import SCHEMAS
from longreach.util import exact_json

router = APIRouter()

_REFUSALS = ("400", "401", "404", "500", "503")
_MOST_LISTED = 100
_CHANGE_BYTES = 4096


@router.post(
    "/v1/documents", **documented(DocumentRequest, DocumentObject, nested=SCHEMAS, also={"201": DocumentObject})
)
async def create_document(request: Request) -> Response:
    """Keep a document. The answer comes at once (201), while the document is read in the background.

    One that is kept already under this name, with the same contents, use, salt and policy, is not kept twice (200).
    A body of the type `text/plain` is the text itself, which is read while it comes. A body of the type
    `application/pdf` is a PDF, whose text is kept. The other fields stand in the URL then.
    """
    if declares_file(request):
        return await create_from_file(request)
    call = await receive(request, DocumentRequest)
    body, service = call.body, call.service
    check_bounds(call.attention, call.engine.info)
    work = service.reading.call(_loaded, call, caller=call.record.caller)
    loaded, contents = await call.attend(work)
    check_token_ids(loaded.tokens, call.engine.info, body.param)
    encoder = TextEncoder(service, call.tokenizer, call.engine.info, call.record.caller)
    prefix = await call.attend(prefix_of(service, encoder, loaded, body.param))
    if not prefix.ids:
        raise InvalidRequestError(f"`{body.param}`: there is no token in it.", param=body.param, code="invalid_value")
    new = loaded.document
    document, is_new = await call.attend(service.documents.put(call.record.owner, new, contents, len(prefix.ids)))
    call.record.reads_document(document.id)
    service.document_reader.prefixes.keep(document, prefix)
    service.document_reader.read(document)
    if body.wait:
        await call.attend(service.document_reader.wait(document.id))
        document = await service.documents.get(document.owner, document.id)
    return json_response(document_object(document), 201 if is_new else 200)


def _loaded(call: Call[DocumentRequest]) -> tuple[LoadedDocument, bytes]:
    """What a request uploads, and what is kept of it."""
    body = call.body
    new = new_document(call.service, body)
    if body.text is not None:
        return LoadedDocument(new, text=body.text), body.text.encode()
    if body.token_ids is not None:
        new = replace(new, kind="tokens", use="completion", tokenizer=call.tokenizer.digest)
        return LoadedDocument(new, tokens=body.token_ids), packed_token_ids(body.token_ids)
    messages = body.messages or []
    if named_files(message.content for message in messages):
        raise InvalidRequestError(
            "`messages`: a document cannot refer to a file; put the file's text in its place.",
            param="messages",
            code="unsupported_value",
        )
    new = replace(new, kind="messages", use="chat")
    kept = exact_json.dumps([message.model_dump(exclude_none=True) for message in messages])
    return LoadedDocument(new, messages=messages), kept


@router.get("/v1/documents", **documented(None, DocumentList, refusals=_REFUSALS))
async def list_documents(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=_MOST_LISTED, description="Documents of a page.")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="desc: the newest first.")] = "desc",
    after: Annotated[str | None, Query(max_length=256, description="The id of the document before the page.")] = None,
    name: Annotated[str | None, Query(max_length=256, description="Only documents with this name.")] = None,
) -> Response:
    """The documents that are kept for this key."""
    service, record = _of(request)
    page = await service.documents.page(record.owner, limit, order, after, name)
    told = [document_object(document) for document in page.documents]
    first, last = (told[0].id, told[-1].id) if told else (None, None)
    listed = DocumentList(told, first, last, page.more)
    return await long_json_response(listed, service.writing, record.caller)


@router.get("/v1/documents/{document_id}", **documented(None, DocumentObject, refusals=_REFUSALS))
async def retrieve_document(request: Request, document_id: str) -> Response:
    """A document that is kept: its state, and what is cached of it now."""
    service, record = _of(request)
    document = await service.documents.get(record.owner, document_id)
    record.reads_document(document.id)
    looked = None if document.state == "uploading" else await service.document_reader.look(document)
    told = msgspec.structs.replace(document_object(document), cache=None if looked is None else document_cache(looked))
    return json_response(told)


@router.post("/v1/documents/{document_id}", **documented(DocumentChange, DocumentObject))
async def change_document(request: Request, document_id: str) -> Response:
    """Change a document's name, its life or its pin."""
    service, record = _of(request)
    body, _ = await read_json(request, DocumentChange, _CHANGE_BYTES, 0, service.reading, record.caller)
    document = await service.documents.get(record.owner, document_id)
    record.reads_document(document.id)
    given = {"name": body.name, "ttl": body.ttl_seconds, "pinned": body.pin}
    new = replace(document, **{name: value for name, value in given.items() if value is not None})
    changed = await service.documents.change(document, new)
    if changed.pinned != document.pinned:
        service.document_reader.change_pin(changed)
    elif changed.state == "reading":
        service.document_reader.read(changed)
    return json_response(document_object(changed))


@router.delete("/v1/documents/{document_id}", **documented(None, DeletedDocument, refusals=_REFUSALS))
async def delete_document(request: Request, document_id: str) -> Response:
    """Let go of a document. What requests have read of it already stays with them."""
    service, record = _of(request)
    document = await service.documents.delete(record.owner, document_id)
    record.reads_document(document.id)
    return json_response(DeletedDocument(document.id))


def _of(request: Request) -> tuple[Service, RequestRecord]:
    return request.app.state.service, request.state.record
