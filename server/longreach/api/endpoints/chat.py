"""`POST /v1/chat/completions`: the last message of a chat is answered."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.receive import receive
from longreach.api.generation.answer import answer
from longreach.api.generation.chat_answer import ChatReader, ForcedToolCalls, PartReader, tool_call_schema
from longreach.api.generation.chat_builder import ChatBuilder
from longreach.api.generation.encode_prompts import encode_chat
from longreach.api.generation.plan_answers import AnswerSpec, tokens_left
from longreach.api.schema.answers.chat import ChatChunk, ChatCompletion
from longreach.api.schema.requests.chat import ChatRequest
from longreach.api.schema.requests.formats import NamedTool
from longreach.api.service.call import Call
from longreach.errors import InvalidRequestError
from longreach.policies.schemas import SCHEMAS

router = APIRouter()


@router.post(
    "/v1/chat/completions", **documented(ChatRequest, ChatCompletion, stream=True, chunk=ChatChunk, nested=SCHEMAS)
)
async def create_chat_completion(request: Request) -> Response:
    """Answer the last message of a chat, in one answer or as a stream of events."""
    call = await receive(request, ChatRequest)
    body, chat = call.body, call.service.chat
    text, prompt = await encode_chat(
        call,
        body.messages,
        body.offered,
        param="messages",
        answer_tokens=body.limit or 1,
        reasoning_effort=body.reasoning_effort,
        enable_thinking=body.enable_thinking,
    )
    max_tokens = tokens_left(prompt, body.limit, call.engine.info, "messages")
    reader, grammar = await call.attend(_form(call, text))
    spec = AnswerSpec(
        prompts=[prompt],
        param="messages",
        max_tokens=max_tokens,
        choices=body.n,
        stops=chat.template.stops,
        grammar=grammar,
        grammar_field=body.form_field if body.forced is None else "tools",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        special=not chat.format.is_plain and grammar is None,
    )
    return await answer(call, ChatBuilder(call, reader), spec)


async def _form(call: Call[ChatRequest], prompt: str) -> tuple[Callable[[], PartReader], str | None]:
    """How the answer is to be read, and the grammar that it has to follow."""
    body, service, caller = call.body, call.service, call.record.caller
    chat, forced = service.chat, body.forced
    if forced is not None:
        named = isinstance(body.tool_choice, NamedTool)
        schema = tool_call_schema(forced, named, body.parallel_tool_calls)
        grammar = await service.grammars.compile("json_schema", schema, "tools", caller)
        return (lambda: ForcedToolCalls(forced[0].name if named else None)), grammar
    if body.offered and not chat.format.has_tool_calls:
        raise InvalidRequestError(
            "`tools`: how this model writes calls is not known, since its tokenizer has no response_template; "
            "force one by `tool_choice`.",
            param="tools",
            code="unsupported_value",
        )
    grammar = await service.compile_form(body, caller)
    if grammar is not None:
        return ChatReader, grammar
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
    return (lambda: ChatReader(chat.format.reader(prompt, tools), not body.parallel_tool_calls)), None
