"""`POST /v1/text`: the text of a file, as a document or a message would have it. Nothing is kept."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.http.body import check_body, media_type, whole_body
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import long_json_response
from longreach.api.schema.answers.text import FileText
from longreach.api.service.file_text import read_pdf
from longreach.api.service.service import Service
from longreach.documents.pdf import is_pdf
from longreach.documents.plain_text import NotTextError, text_of
from longreach.errors import InvalidRequestError

router = APIRouter()

_REFUSALS = ("400", "401", "408", "413", "415", "429", "500", "503")
_TOLD = documented(None, FileText, refusals=_REFUSALS)
_TOLD["openapi_extra"]["requestBody"] = {
    "required": True,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


@router.post("/v1/text", **_TOLD)
async def text_of_file(
    request: Request,
    name: Annotated[str | None, Query(max_length=256, description="The file's name, for errors.")] = None,
) -> Response:
    """The text of a PDF, page by page, or of a text file. The body is the file itself. Nothing is kept of it."""
    service: Service = request.app.state.service
    record: RequestRecord = request.state.record
    engine, _ = service.require_ready()
    limit = service.settings.file_limit(engine.info.max_model_len)
    check_body(request, limit)
    data = await whole_body(request, limit)
    declared = media_type(request)
    if is_pdf(data, declared):
        found = await read_pdf(service, record, bytes(data), name, "text")
        told = FileText(text=found.text, pages=found.pages, pages_without_text=found.pages_without_text)
    else:
        try:
            text = await service.reading.call(
                text_of, bytes(data), name, declared, caller=record.caller, size=len(data)
            )
        except NotTextError as error:
            raise InvalidRequestError(f"`text`: {error}.", param="text", code="not_text") from None
        told = FileText(text=text, pages=None, pages_without_text=None)
    return await long_json_response(told, service.writing, record.caller)
