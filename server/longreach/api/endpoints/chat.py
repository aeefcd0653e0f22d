"""`POST /v1/chat/completions`: messages become a prompt, and the answer's parts OpenAI's chat objects."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.receive import receive
from longreach.api.generation.chat_answer import ChatReader, ForcedToolCalls, PartReader, tool_call_schema
from longreach.api.generation.choices import run_choices
from longreach.api.generation.encode_prompts import encode_chat
from longreach.api.generation.logprob_objects import chat_logprobs
from longreach.api.generation.plan_answers import make_asks, tokens_left
from longreach.api.generation.text_stream import TextDelta
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import StreamExtras, stream_response, usage_of, whole_response
from longreach.api.http.sse import sse_data
from longreach.api.schema.answers.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatToolCall,
    FunctionCall,
)
from longreach.api.schema.answers.usage import FinishReason
from longreach.api.schema.requests.chat import ChatRequest
from longreach.api.schema.requests.formats import NamedTool
from longreach.api.service.service import Service
from longreach.errors import InvalidRequestError
from longreach.policies.schemas import SCHEMAS
from longreach.text.answer_format import Part, ToolCall
from longreach.text.tokenizer import Tokenizer

router = APIRouter()


@router.post(
    "/v1/chat/completions", **documented(ChatRequest, ChatCompletion, stream=True, chunk=ChatChunk, nested=SCHEMAS)
)
async def create_chat_completion(request: Request) -> Response:
    """Answer the last message of a chat, in one answer or as a stream of events."""
    call = await receive(request, ChatRequest)
    asked, service, record, engine, tokenizer = call.asked, call.service, call.record, call.engine, call.tokenizer
    chat = service.chat
    text, prompt = await encode_chat(
        call,
        asked.messages,
        asked.offered,
        param="messages",
        answer_tokens=asked.limit or 1,
        reasoning_effort=asked.reasoning_effort,
        enable_thinking=asked.enable_thinking,
    )
    max_tokens = tokens_left(prompt, asked.limit, engine.info, "messages")
    reader, grammar = await call.attend(_form(asked, service, text, record.caller))
    completion = _ChatCompletion(asked, record, len(prompt), tokenizer, reader)
    asks = make_asks(
        asked,
        [prompt],
        param="messages",
        answer_id=completion.id,
        engine=engine,
        service=service,
        record=record,
        max_tokens=max_tokens,
        choices=asked.n,
        stops=chat.template.stops,
        grammar=grammar,
        grammar_field=asked.form_field if asked.forced is None else "tools",
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        special=not chat.format.is_plain and grammar is None,
    )
    deltas = run_choices(engine, tokenizer, asks, record)
    if asked.stream:
        return stream_response(service, record, completion.events(deltas, StreamExtras(asked, record, engine, asks)))
    return await whole_response(request, service, record, completion.whole(deltas))


async def _form(
    asked: ChatRequest, service: Service, prompt: str, caller: str
) -> tuple[Callable[[], PartReader], str | None]:
    """How the answer is to be read, and the grammar that it has to follow."""
    chat, forced = service.chat, asked.forced
    if forced is not None:
        named = isinstance(asked.tool_choice, NamedTool)
        schema = tool_call_schema(forced, named, asked.parallel_tool_calls)
        grammar = await service.grammars.compile("json_schema", schema, "tools", caller)
        return (lambda: ForcedToolCalls(forced[0].name if named else None)), grammar
    if asked.offered and not chat.format.has_tool_calls:
        raise InvalidRequestError(
            "`tools`: how this model writes calls is not known, since its tokenizer has no response_template; "
            "force one by `tool_choice`.",
            param="tools",
            code="unsupported_value",
        )
    grammar = await service.compile_form(asked, caller)
    if grammar is not None:
        return ChatReader, grammar
    tools = [tool.model_dump(exclude_none=True) for tool in asked.offered]
    return (lambda: ChatReader(chat.format.reader(prompt, tools), not asked.parallel_tool_calls)), None


class _ChatCompletion:
    """The OpenAI objects of one request's answers."""

    def __init__(
        self,
        asked: ChatRequest,
        record: RequestRecord,
        prompt_tokens: int,
        tokenizer: Tokenizer,
        reader: Callable[[], PartReader],
    ) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._asked = asked
        self._record = record
        self._tokenizer = tokenizer
        self._readers = [reader() for _ in range(asked.n)]
        record.completion_id = self.id
        record.prompt_tokens = prompt_tokens

    async def whole(self, deltas: AsyncGenerator[tuple[int, TextDelta], None]) -> ChatCompletion:
        """The whole answer as one object."""
        drafts = [_Draft() for _ in self._readers]
        async with contextlib.aclosing(deltas):
            async for index, delta in deltas:
                draft = drafts[index]
                if draft.finish_reason is not None:
                    continue
                draft.logprobs += delta.logprobs
                for part in self._parts(index, delta):
                    draft.add(part)
                draft.finish_reason = self._finish(index, delta)
                if all(draft.finish_reason is not None for draft in drafts):
                    break  # some may be cut off behind their first call
        self._record.finish = drafts[0].finish_reason
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._asked.model,
            choices=[self._choice(index, draft) for index, draft in enumerate(drafts)],
            usage=usage_of(self._record),
            service_tier=self._asked.service_tier or UNSET,
        )

    async def events(
        self, deltas: AsyncGenerator[tuple[int, TextDelta], None], extras: StreamExtras
    ) -> AsyncGenerator[bytes, None]:
        """The answer as a stream of chunks."""
        started: set[int] = set()
        ended: set[int] = set()
        async with contextlib.aclosing(deltas):
            async for index, delta in deltas:
                if (progress := extras.new_progress()) is not None:
                    yield sse_data(self._chunk([], usage=extras.usage, prompt_progress=progress))
                if delta.reading or index in ended:
                    continue
                if index not in started:
                    started.add(index)
                    first = ChatDelta(role="assistant", content="")
                    yield sse_data(self._chunk([ChatChunkChoice(index=index, delta=first)], usage=extras.usage))
                logprobs = chat_logprobs(self._tokenizer, delta.logprobs) if self._asked.logprobs else None
                for piece in self._deltas(index, delta):
                    choice = ChatChunkChoice(index=index, delta=piece, logprobs=logprobs)
                    yield sse_data(self._chunk([choice], usage=extras.usage))
                    logprobs = None
                if (finish := self._finish(index, delta)) is not None:
                    ended.add(index)
                    self._record.finish = finish
                    last = ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=logprobs, finish_reason=finish)
                    yield sse_data(self._chunk([last], usage=extras.usage))
                    if len(ended) == len(self._readers):
                        break
        if extras.last_usage:
            yield sse_data(self._chunk([], usage=usage_of(self._record)))

    def _parts(self, index: int, delta: TextDelta) -> list[Part]:
        reader = self._readers[index]
        parts = reader.push(delta.text)
        return parts if delta.finish_reason is None else [*parts, *reader.flush(delta.finish_reason)]

    def _deltas(self, index: int, delta: TextDelta) -> list[ChatDelta]:
        reader = self._readers[index]
        found = []
        for part in self._parts(index, delta):
            if part.kind == "tool_call" and part.tool_call is not None:
                call = _tool_call_object(part.tool_call, index=reader.tool_calls_sent)
                reader.tool_calls_sent += 1
                found.append(ChatDelta(tool_calls=[call]))
            elif part.kind == "reasoning":
                found.append(ChatDelta(reasoning_content=part.text))
            else:
                found.append(ChatDelta(content=part.text))
        if not found and delta.logprobs:
            found.append(ChatDelta(content=""))
        return found

    def _finish(self, index: int, delta: TextDelta) -> FinishReason | None:
        reader = self._readers[index]
        if reader.is_over:
            return "tool_calls"
        if delta.finish_reason == "stop" and reader.has_tool_calls:
            return "tool_calls"
        return delta.finish_reason

    def _choice(self, index: int, draft: _Draft) -> ChatChoice:
        assert draft.finish_reason is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(
                content=draft.content if draft.content or not draft.tool_calls else None,
                reasoning_content=draft.reasoning or UNSET,
                tool_calls=[_tool_call_object(call) for call in draft.tool_calls] or UNSET,
            ),
            logprobs=chat_logprobs(self._tokenizer, draft.logprobs) if self._asked.logprobs else None,
            finish_reason=draft.finish_reason,
        )

    def _chunk(self, choices: list[ChatChunkChoice], **more) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self._created,
            model=self._asked.model,
            choices=choices,
            service_tier=self._asked.service_tier or UNSET,
            **more,
        )


class _Draft:
    """One message while its parts come in."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[ToolCall] = []
        self.logprobs: list = []
        self.finish_reason: FinishReason | None = None

    def add(self, part: Part) -> None:
        if part.kind == "tool_call" and part.tool_call is not None:
            self.tool_calls.append(part.tool_call)
        elif part.kind == "reasoning":
            self.reasoning += part.text
        else:
            self.content += part.text


def _tool_call_object(call: ToolCall, index: int | None = None) -> ChatToolCall:
    function = FunctionCall(name=call.name, arguments=call.arguments)
    return ChatToolCall(index=UNSET if index is None else index, id=call.id, type="function", function=function)
