"""`POST /v1/chat/completions`: the last message of a chat is answered."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.receive import receive
from longreach.api.generation.answer import answer
from longreach.api.generation.chat_builder import ChatBuilder
from longreach.api.generation.prepare_chat import prepare_chat
from longreach.api.schema.answers.chat import ChatChunk, ChatCompletion
from longreach.api.schema.requests.chat import ChatRequest
from longreach.policies.schemas import SCHEMAS

router = APIRouter()


@router.post(
    "/v1/chat/completions", **documented(ChatRequest, ChatCompletion, stream=True, chunk=ChatChunk, nested=SCHEMAS)
)
async def create_chat_completion(request: Request) -> Response:
    """Answer the last message of a chat, in one answer or as a stream of events."""
    call = await receive(request, ChatRequest)
    body = call.body
    prepared = await prepare_chat(
        call,
        body.turn,
        limit=body.limit,
        choices=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return await answer(call, ChatBuilder(call, prepared.reader), prepared.spec)
