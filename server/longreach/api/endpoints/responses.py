"""`POST /v1/responses`, for text: the same answers as a chat's, in the newer API's form."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.receive import receive
from longreach.api.generation.answer import answer
from longreach.api.generation.prepare_chat import prepare_chat
from longreach.api.generation.response_builder import ResponseBuilder
from longreach.api.schema.answers.responses import ResponseEvent, ResponseObject
from longreach.api.schema.requests.responses import InputMessage, ResponseRequest
from longreach.policies.schemas import SCHEMAS

router = APIRouter()


@router.post(
    "/v1/responses",
    **documented(ResponseRequest, ResponseObject, stream=True, chunk=ResponseEvent, nested=(InputMessage, *SCHEMAS)),
)
async def create_response(request: Request) -> Response:
    """Answer a text or a chat, in one answer or as a stream of events."""
    call = await receive(request, ResponseRequest)
    prepared = await prepare_chat(call, call.body.turn, limit=call.body.max_output_tokens)
    return await answer(call, ResponseBuilder(call, prepared.reader()), prepared.spec)
