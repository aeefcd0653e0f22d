"""The requests that came with an `Idempotency-Key`: `GET` and `DELETE` of `/v1/requests/{key}`.

Another key's request is not found, as if there were none.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.answer_once import follow
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import json_response
from longreach.api.schema.answers.requests import DeletedAnswer, RequestAnswer
from longreach.api.service.service import Service
from longreach.errors import HttpError, quoted

router = APIRouter()

_REFUSALS = ("401", "404", "409", "500", "503")


@router.get("/v1/requests/{key:path}", **documented(None, RequestAnswer, stream=True, refusals=_REFUSALS))
async def retrieve_answer(request: Request, key: str) -> Response:
    """The answer to the request with this `Idempotency-Key`, as that has it: whole once it is, or as a stream.

    A stream begins with its first event, or behind the one that the header `Last-Event-ID` names.
    """
    service, record = _of(request)
    run = service.identified.find(record.owner, key)
    if run is None:
        raise _not_found(key)
    return await follow(run, request, replayed=True)


@router.delete("/v1/requests/{key:path}", **documented(None, DeletedAnswer, refusals=_REFUSALS))
async def end_request(request: Request, key: str) -> Response:
    """End the request with this `Idempotency-Key`, and forget its answer."""
    service, record = _of(request)
    if not await service.identified.end(record.owner, key):
        raise _not_found(key)
    return json_response(DeletedAnswer(key))


def _of(request: Request) -> tuple[Service, RequestRecord]:
    return request.app.state.service, request.state.record


def _not_found(key: str) -> HttpError:
    return HttpError(
        f"There is no request with the Idempotency-Key {quoted(key)}: it has never come to this server, or its answer "
        "is not held any more.",
        code="request_not_found",
        status=404,
    )
