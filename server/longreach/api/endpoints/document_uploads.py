"""`POST /v1/documents` with a file: a text, which is read while it comes, or a PDF. The URL has the other fields."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from longreach.api.generation.plan_answers import check_bounds
from longreach.api.http.body import HeldBody, body_length, check_body, media_type
from longreach.api.http.race import race
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import json_response
from longreach.api.schema.answers.documents import document_object
from longreach.api.schema.requests.documents import DocumentFields
from longreach.api.schema.requests.parse import parse
from longreach.api.service.document_upload import upload_text
from longreach.api.service.file_text import Incoming
from longreach.api.service.service import Service
from longreach.documents.document import NewDocument
from longreach.documents.pdf import MEDIA_TYPES, is_pdf
from longreach.errors import InvalidRequestError

_TRUTHS: dict[str, object] = {"true": True, "1": True, "": True, "false": False, "0": False}
_NUMBER = re.compile(r"[0-9]{1,18}")


def declares_file(request: Request) -> bool:
    """Whether the body is a text as it is, or a PDF."""
    declared = media_type(request) or ""
    return declared.startswith("text/") or declared in MEDIA_TYPES


async def create_from_file(request: Request) -> Response:
    """Keep the text or the PDF that comes as a document, as `create_document`.

    Raises:
        ApiError: it is refused, or nothing can be taken at this moment.
    """
    service: Service = request.app.state.service
    record: RequestRecord = request.state.record
    held: HeldBody = request.state.held_body
    engine, _ = service.require_ready()
    fields = _fields(request)
    if fields.model is not None:
        service.require_model(fields.model)
    new = new_document(service, fields)
    check_bounds(service.settings.default_policy if new.attention is None else new.attention, engine.info)
    limit = service.settings.file_limit if is_pdf(b"", media_type(request)) else service.settings.body_limit
    check_body(request, limit(engine.info.max_model_len))
    incoming = Incoming(request.stream(), media_type(request), body_length(request), held.let_go)
    document, is_new = await race(upload_text(service, record, new, incoming), service.until_cut())
    record.reads_document(document.id)
    if fields.wait:
        await race(service.document_reader.wait(document.id), service.until_cut())
        document = await service.documents.get(document.owner, document.id)
    return json_response(document_object(document), 201 if is_new else 200)


def new_document(service: Service, fields: DocumentFields) -> NewDocument:
    """A document of text that is asked for."""
    default = "completion" if service.chat.template.is_default else "chat"
    return NewDocument(
        kind="text",
        use=fields.use or default,
        name=fields.name,
        ttl=fields.ttl_seconds,
        pinned=fields.pin,
        cache_salt=fields.cache_salt,
        attention=None if fields.attention is None else fields.attention.resolve(),
    )


def _fields(request: Request) -> DocumentFields:
    given: dict[str, object] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise InvalidRequestError(f"`{name[:64]}` stands in the URL twice.", param=name[:64], code="invalid_value")
        if name in ("pin", "wait"):
            given[name] = _TRUTHS.get(value, value)
        elif name == "ttl_seconds":
            given[name] = int(value) if _NUMBER.fullmatch(value) else value
        else:
            given[name] = value
    return parse(DocumentFields, given)
