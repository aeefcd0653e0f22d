"""The responses that are kept: `GET`, `DELETE`, `POST .../cancel` and `GET .../input_items` of `/v1/responses/{id}`.

Another key's response is not found, as if there were none.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.http.event_record import EventRecord
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import json_response, long_json_response
from longreach.api.responses.in_background import stream_of
from longreach.api.responses.kept_object import kept_object
from longreach.api.schema.answers.responses import DeletedResponse, InputItemList, ResponseEvent, ResponseObject
from longreach.api.service.service import Service
from longreach.api.service.unfinished import Unfinished
from longreach.errors import HttpError, InvalidRequestError, UnavailableError, quoted

router = APIRouter()

_REFUSALS = ("400", "401", "404", "500", "503")
_MOST_ITEMS = 100
_RETRY_SECONDS = 2
Ids = Annotated[list[str] | None, Query(max_length=32)]


@router.get(
    "/v1/responses/{response_id}",
    **documented(None, ResponseObject, stream=True, chunk=ResponseEvent, refusals=_REFUSALS),
)
async def retrieve_response(
    request: Request,
    response_id: str,
    stream: Annotated[bool, Query(description="The events of a background response that is streamed.")] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="With `stream`: only events after this number.")
    ] = None,
) -> Response:
    """A response that is kept, or that is being made in the background."""
    service, record = _of(request)
    found = await _require(service, record, response_id)
    if stream:
        events = service.background.events(record.owner, response_id)
        if events is None and Unfinished(record.owner, response_id) in service.kept.waiting:
            raise UnavailableError(
                "This response is begun again once the model is loaded.", code="loading", retry_after=_RETRY_SECONDS
            )
        if events is None:
            raise InvalidRequestError(
                "`stream`: the events of this response are not kept. Those of a background response that was created "
                "with `stream: true` are, while it is made and for a while after.",
                param="stream",
                code="unsupported_value",
            )
        return stream_of(events, record, service, _first(request, events, starting_after))
    if starting_after is not None:
        raise InvalidRequestError(
            "`starting_after` is only allowed with `stream=true`.", param="starting_after", code="invalid_value"
        )
    return await long_json_response(found, service.writing, record.caller)


@router.delete("/v1/responses/{response_id}", **documented(None, DeletedResponse, refusals=_REFUSALS))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response; one that is being made is ended. What was built on it cannot be continued any more."""
    service, record = _of(request)
    if not service.kept.enabled:
        raise _not_found(response_id)
    await service.background.cancel(record.owner, response_id)
    service.background.forget(record.owner, response_id)
    if not await service.kept.delete(record.owner, response_id):
        raise _not_found(response_id)
    return json_response(DeletedResponse(response_id))


@router.post("/v1/responses/{response_id}/cancel", **documented(None, ResponseObject, refusals=_REFUSALS))
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a background response; one that has ended already stays as it is."""
    service, record = _of(request)
    if not await service.kept.cancel_waiting(record.owner, response_id):
        await service.background.cancel(record.owner, response_id)
    found = await _require(service, record, response_id)
    if not found["background"]:
        raise InvalidRequestError(
            "Only a background response can be cancelled; to end another, close its connection.",
            code="invalid_value",
        )
    return await long_json_response(found, service.writing, record.caller)


@router.get("/v1/responses/{response_id}/input_items", **documented(None, InputItemList, refusals=_REFUSALS))
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=_MOST_ITEMS, description="Items of a page.")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="desc: the last item first.")] = "desc",
    after: Annotated[str | None, Query(max_length=256, description="The id of the item before the page.")] = None,
) -> Response:
    """The items of a response's own input, without those of the responses before it."""
    service, record = _of(request)
    items = await service.kept.input_items(record.owner, response_id) if service.kept.enabled else None
    if items is None:
        raise _not_found(response_id)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        start = next((place for place, item in enumerate(items, start=1) if item["id"] == after), 0)
        if not start:
            raise InvalidRequestError(
                f"`after`: the input has no item {quoted(after)}.", param="after", code="invalid_value"
            )
    page = items[start : start + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    listed = InputItemList(page, first, last, len(items) > start + limit)
    return await long_json_response(listed, service.writing, record.caller)


def _first(request: Request, events: EventRecord, starting_after: int | None) -> int | None:
    """The number of the first event that is wanted. A browser's `EventSource` that connects again repeats the URL, and
    names the last event that it has got in a header."""
    last = request.headers.get("last-event-id")
    if last is None:
        return None if starting_after is None else starting_after + 1
    if (first := events.after(last)) is None:
        raise InvalidRequestError(
            f"`Last-Event-ID`: no event of this response has the id {quoted(last)}.", code="invalid_value"
        )
    return first


def _of(request: Request) -> tuple[Service, RequestRecord]:
    return request.app.state.service, request.state.record


async def _require(service: Service, record: RequestRecord, response_id: str) -> dict[str, object]:
    found = await kept_object(service, record.owner, response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> HttpError:
    return HttpError(f"There is no response {quoted(response_id)}.", code="response_not_found", status=404)
