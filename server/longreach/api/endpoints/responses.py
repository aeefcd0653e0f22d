"""`POST /v1/responses`, for text: the same answers as a chat's, in the newer API's form, and kept for later."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.answer_once import answer_once
from longreach.api.endpoints.receive import receive
from longreach.api.generation.encode_prompts import encode_chat
from longreach.api.generation.place_document import placed
from longreach.api.http.respond import json_response
from longreach.api.responses.answer_response import answer_response
from longreach.api.responses.conversation import read_conversation
from longreach.api.schema.answers.responses import InputTokenCount, ResponseEvent, ResponseObject
from longreach.api.schema.requests.responses import InputTokensRequest, ResponseRequest
from longreach.policies.schemas import SCHEMAS

router = APIRouter()

_NESTED = (*ResponseRequest.NESTED, *SCHEMAS)


@router.post(
    "/v1/responses",
    **documented(ResponseRequest, ResponseObject, stream=True, identified=True, chunk=ResponseEvent, nested=_NESTED),
)
async def create_response(request: Request) -> Response:
    """Answer a text or a conversation, in one answer, as a stream of events, or in the background."""
    return await answer_once(request, ResponseRequest, answer_response)


@router.post(
    "/v1/responses/input_tokens", **documented(InputTokensRequest, InputTokenCount, nested=ResponseRequest.NESTED)
)
async def count_input_tokens(request: Request) -> Response:
    """The tokens of the prompt that a response would read."""
    call = await receive(request, InputTokensRequest)
    conversation = await read_conversation(call)
    _, prompt = await encode_chat(call, await placed(call, call.body.turn(conversation.messages)))
    return json_response(InputTokenCount(len(prompt)))
