"""`POST /v1/estimate`: what a request would get if it were sent now. It is not sent, and changes nothing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.completions import prompts_of
from longreach.api.endpoints.receive import receive
from longreach.api.generation.choose_rope import answer_bound
from longreach.api.generation.encode_prompts import encode_chat
from longreach.api.generation.place_document import placed
from longreach.api.generation.plan_answers import AnswerSpec, checked_attention, has_room, predicted, tokens_left
from longreach.api.generation.predict import Prediction
from longreach.api.http.body import Choice
from longreach.api.http.error_forms import speaks_anthropic
from longreach.api.http.respond import json_response
from longreach.api.responses.conversation import fitted, read_conversation
from longreach.api.schema.answers.estimate import Estimate, EstimatedSeconds, EstimatedTiers
from longreach.api.schema.requests.chat import ChatRequest
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.completions import CompletionRequest
from longreach.api.schema.requests.messages import MessageRequest, PromptFields
from longreach.api.schema.requests.responses import ResponseRequest
from longreach.api.schema.requests.sampling import SamplingFields
from longreach.api.service.call import Call
from longreach.engine.looks import Looked
from longreach.policies.schemas import SCHEMAS

router = APIRouter()

_NESTED = (*PromptFields.NESTED, *ResponseRequest.NESTED, *SCHEMAS)
_BODIES = (ChatRequest, CompletionRequest, ResponseRequest, MessageRequest)
_OPENAI: Choice[SamplingFields] = Choice(
    {
        "messages": ChatRequest,
        "prompt": CompletionRequest,
        "input": ResponseRequest,
        "previous_response_id": ResponseRequest,
    },
    ChatRequest,
)


@router.post("/v1/estimate", **documented(_BODIES, Estimate, nested=_NESTED))
async def create_estimate(request: Request) -> Response:
    """What a request would get from the caches now, how long its first token would take, and the memory it would hold.

    The body is that of the request: with `messages` a chat completion's, with `prompt` a completion's, with `input` a
    response's. With the header `anthropic-version` it is a message's. Nothing is generated, and no cache is changed.
    """
    call: Call[Any] = await receive(request, MessageRequest if speaks_anthropic(request.scope) else _OPENAI)
    spec = await _spec(call)
    checked_attention(call, spec)
    call.record.prompt_tokens = sum(map(len, spec.prompts))
    found = await predicted(call, spec)
    if call.body.deadline_ms is not None:
        call.record.due(call.body.deadline_ms, found.now)
    return json_response(_told(call, found, is_full=not has_room(call, spec)))


async def _spec(call: Call[Any]) -> AnswerSpec:
    """The prompts of a call as its own endpoint makes them, and how long answers may be."""
    body = call.body
    if isinstance(body, CompletionRequest):
        prompts = await prompts_of(call)
        return AnswerSpec(prompts=prompts, param="prompt", max_tokens=body.limit, choices=body.candidates)
    if isinstance(body, ChatRequest):
        return await _chat(call, body.turn, body.limit, body.n, body.add_special_tokens, body.truncate_prompt_tokens)
    if isinstance(body, MessageRequest):
        spec = await _chat(call, body.turn(call.service.chat.template.reads), None)
        most = answer_bound(call, spec.prompts[0], body.max_tokens, spec.param)
        return AnswerSpec(prompts=spec.prompts, param=spec.param, max_tokens=most)
    conversation = await read_conversation(call)
    turn = body.turn(conversation.messages)
    return await fitted(call, turn, lambda shorter: _chat(call, shorter, body.max_output_tokens))


async def _chat(
    call: Call[Any],
    turn: ChatTurn,
    limit: int | None,
    choices: int = 1,
    special: bool | None = None,
    keep: int | None = None,
) -> AnswerSpec:
    turn = await placed(call, turn)
    _, prompt = await encode_chat(call, turn, answer_tokens=limit or 1, special=special, keep=keep)
    left = tokens_left(call, prompt, limit, turn.param)
    return AnswerSpec(prompts=[prompt], param=turn.param, max_tokens=left, choices=choices)


def _told(call: Call[SamplingFields], found: Prediction, *, is_full: bool) -> Estimate:
    looks, deadline = found.looks, call.body.deadline_ms
    meets = None if deadline is None or found.now is None else 1000 * found.now <= deadline
    return Estimate(
        model=call.body.model,
        prompt_tokens=sum(one.total for one in looks),
        cached_tokens=_tiers(looks, ""),
        cached_bytes=_tiers(looks, "_bytes"),
        kv_bytes=sum(one.kv_bytes for one in looks),
        fits_now=all(one.fits_now for one in looks),
        queue_full=is_full,
        requests_ahead=max(one.ahead for one in looks),
        seconds=EstimatedSeconds(now=found.now, alone=found.alone, whole=found.whole, dense=found.dense),
        policy=call.attention.name,
        meets_deadline=meets,
    )


def _tiers(looks: list[Looked], suffix: str) -> EstimatedTiers:
    gpu, host, disk = (sum(getattr(one, name + suffix) for one in looks) for name in ("gpu", "host", "disk"))
    return EstimatedTiers(gpu, host, disk)
