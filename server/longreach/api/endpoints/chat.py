"""`POST /v1/chat/completions`: the last message of a chat is answered."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.answer_once import answer_once
from longreach.api.generation.answer import answer
from longreach.api.generation.chat_answer import PartReader
from longreach.api.generation.chat_builder import ChatBuilder
from longreach.api.generation.plan_answers import check_scored
from longreach.api.generation.prepare_chat import prepare_chat
from longreach.api.schema.answers.chat import ChatChunk, ChatCompletion
from longreach.api.schema.requests.chat import ChatRequest
from longreach.api.service.call import Call
from longreach.policies.schemas import SCHEMAS
from longreach.text.answer_reader import AnswerReader

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **documented(ChatRequest, ChatCompletion, stream=True, identified=True, chunk=ChatChunk, nested=SCHEMAS),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer the last message of a chat, in one answer or as a stream of events."""
    return await answer_once(request, ChatRequest, _answer)


async def _answer(call: Call[ChatRequest]) -> Response:
    body = call.body
    prepared = await prepare_chat(
        call,
        body.turn,
        limit=body.limit,
        choices=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        special=body.add_special_tokens,
        keep=body.truncate_prompt_tokens,
    )
    spec = replace(prepared.spec, prompt_logprobs=body.prompt_logprobs)
    check_scored(body.prompt_logprobs, spec.prompts, "prompt_logprobs")
    reader = prepared.reader if body.separate_reasoning else _everything_is_content
    return await answer(call, ChatBuilder(call, reader), spec)


def _everything_is_content() -> PartReader:
    return PartReader(AnswerReader())
