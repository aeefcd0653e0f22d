"""`POST /v1/responses`, for text: the same answers as a chat's, in the newer API's form."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.receive import receive
from longreach.api.generation.answer import answer
from longreach.api.generation.chat_answer import ChatReader
from longreach.api.generation.encode_prompts import encode_chat
from longreach.api.generation.plan_answers import AnswerSpec, tokens_left
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
    body, chat = call.body, call.service.chat
    effort = None if body.reasoning is None else body.reasoning.effort
    text, prompt = await encode_chat(
        call, body.messages, param="input", answer_tokens=body.max_output_tokens or 1, reasoning_effort=effort
    )
    max_tokens = tokens_left(prompt, body.max_output_tokens, call.engine.info, "input")
    grammar = await call.attend(call.service.compile_form(body, call.record.caller))
    reader = ChatReader() if grammar is not None else ChatReader(chat.format.reader(text, []))
    spec = AnswerSpec(
        prompts=[prompt],
        param="input",
        max_tokens=max_tokens,
        stops=chat.template.stops,
        grammar=grammar,
        grammar_field=body.form_field,
        special=not chat.format.is_plain and grammar is None,
    )
    return await answer(call, ResponseBuilder(call, reader), spec)
