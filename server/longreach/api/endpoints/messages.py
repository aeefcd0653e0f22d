"""`POST /v1/messages` and its `count_tokens`: the same answers as a chat's, in Anthropic's protocol."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.answer_once import answer_once
from longreach.api.endpoints.receive import receive
from longreach.api.generation.answer import answer
from longreach.api.generation.choose_rope import answer_bound
from longreach.api.generation.encode_prompts import encode_chat
from longreach.api.generation.message_builder import MessageBuilder
from longreach.api.generation.place_document import placed
from longreach.api.generation.prepare_chat import prepare_chat
from longreach.api.http.respond import json_response
from longreach.api.schema.answers.messages import AnthropicErrorBody, MessageEvent, MessageObject, TokenCount
from longreach.api.schema.requests.messages import CountTokensRequest, MessageRequest, PromptFields
from longreach.api.service.call import Call
from longreach.policies.schemas import SCHEMAS

router = APIRouter()


@router.post(
    "/v1/messages",
    **documented(
        MessageRequest,
        MessageObject,
        stream=True,
        identified=True,
        chunk=MessageEvent,
        nested=(*PromptFields.NESTED, *SCHEMAS),
        error=AnthropicErrorBody,
    ),
)
async def create_message(request: Request) -> Response:
    """Answer the last message of a conversation, in one answer or as a stream of events."""
    return await answer_once(request, MessageRequest, _answer)


async def _answer(call: Call[MessageRequest]) -> Response:
    body = call.body
    # The context may have less left than is asked for: `max_tokens` bounds an answer, and reserves nothing.
    prepared = await prepare_chat(call, body.turn(call.service.chat.template.reads), limit=None)
    spec = prepared.spec
    most = answer_bound(call, spec.prompts[0], body.max_tokens, spec.param)
    spec = replace(spec, max_tokens=most, stops=[*spec.stops, *body.stop_sequences])
    return await answer(call, MessageBuilder(call, prepared.reader(), fills_context=body.max_tokens > most), spec)


@router.post(
    "/v1/messages/count_tokens",
    **documented(CountTokensRequest, TokenCount, nested=PromptFields.NESTED, error=AnthropicErrorBody),
)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a message would have."""
    call = await receive(request, CountTokensRequest)
    turn = call.body.turn(call.service.chat.template.reads)
    _, ids = await encode_chat(call, await placed(call, turn))
    managed = UNSET if call.body.context_management is None else {"original_input_tokens": len(ids)}
    return json_response(TokenCount(input_tokens=len(ids), context_management=managed))
