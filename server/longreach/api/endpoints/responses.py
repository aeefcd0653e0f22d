"""`POST /v1/responses`, for text: the same answers as a chat's, in the newer API's objects and events."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.receive import receive
from longreach.api.generation.attention_usage import attention_usage
from longreach.api.generation.chat_answer import ChatReader
from longreach.api.generation.encode_prompts import encode_chat
from longreach.api.generation.plan_answers import make_asks, tokens_left
from longreach.api.generation.text_stream import TextDelta, generate_text
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import stream_response, whole_response
from longreach.api.http.sse import sse_data
from longreach.api.schema.answers.responses import (
    Incomplete,
    InputTokens,
    Item,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ReasoningTokens,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    Status,
)
from longreach.api.schema.requests.responses import InputMessage, ResponseRequest
from longreach.engine.messages import FinishReason, Sampling
from longreach.policies.schemas import SCHEMAS

router = APIRouter()


@router.post(
    "/v1/responses",
    **documented(ResponseRequest, ResponseObject, stream=True, chunk=ResponseEvent, nested=(InputMessage, *SCHEMAS)),
)
async def create_response(request: Request) -> Response:
    """Answer a text or a chat, in one answer or as a stream of events."""
    call = await receive(request, ResponseRequest)
    asked, service, record, engine, tokenizer = call.asked, call.service, call.record, call.engine, call.tokenizer
    chat = service.chat
    effort = None if asked.reasoning is None else asked.reasoning.effort
    text, prompt = await encode_chat(
        call, asked.messages, param="input", answer_tokens=asked.max_output_tokens or 1, reasoning_effort=effort
    )
    max_tokens = tokens_left(prompt, asked.max_output_tokens, engine.info, "input")
    grammar = await call.attend(service.compile_form(asked, record.caller))
    reader = ChatReader() if grammar is not None else ChatReader(chat.format.reader(text, []))
    sampling = asked.sampling(engine.info.vocab_size, 0, service.sampling_defaults)
    answer = _Response(asked, record, len(prompt), reader, sampling)
    [ask] = make_asks(
        asked,
        [prompt],
        param="input",
        answer_id=answer.id,
        engine=engine,
        service=service,
        record=record,
        max_tokens=max_tokens,
        stops=chat.template.stops,
        grammar=grammar,
        grammar_field=asked.form_field,
        special=not chat.format.is_plain and grammar is None,
    )
    deltas = generate_text(engine, tokenizer, ask, record)
    if asked.stream:
        return stream_response(service, record, answer.events(deltas))
    return await whole_response(request, service, record, answer.whole(deltas))


class _Response:
    """One response while it grows: items of reasoning and words, and the events that tell of them."""

    def __init__(
        self,
        asked: ResponseRequest,
        record: RequestRecord,
        prompt_tokens: int,
        reader: ChatReader,
        sampling: Sampling,
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._asked = asked
        self._record = record
        self._reader = reader
        self._sampling = sampling
        self._items: list[Item] = []
        self._open: tuple[str, str, str] | None = None  # kind, id and text of the item that is being written
        self._reasoning_tokens = 0
        self._sequence = 0
        record.completion_id = self.id
        record.prompt_tokens = prompt_tokens

    async def whole(self, deltas: AsyncGenerator[TextDelta, None]) -> ResponseObject:
        """The whole response."""
        finish: FinishReason | None = None
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                finish = delta.finish_reason
                for _ in self._advance(delta):
                    pass
        return self._ended(finish)

    async def events(self, deltas: AsyncGenerator[TextDelta, None]) -> AsyncGenerator[bytes, None]:
        """The response as a stream of events."""
        finish: FinishReason | None = None
        yield self._event("response.created", response=self._object("in_progress"))
        yield self._event("response.in_progress", response=self._object("in_progress"))
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                finish = delta.finish_reason
                for event in self._advance(delta):
                    yield event
        whole = self._ended(finish)
        yield self._event(f"response.{whole.status}", response=whole)

    def _advance(self, delta: TextDelta) -> Iterator[bytes]:
        """Take in a delta; the events that tell of it."""
        before = self._record.output_tokens
        parts = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._reader.flush(delta.finish_reason)
        for part in parts:
            kind = "reasoning" if part.kind == "reasoning" else "message"
            if self._open is None or self._open[0] != kind:
                yield from self._close("completed")
                yield from self._begin(kind)
            assert self._open is not None
            _, item_id, text = self._open
            self._open = kind, item_id, text + part.text
            yield self._text_event("delta", delta=part.text)
        if self._open is not None and self._open[0] == "reasoning":
            self._reasoning_tokens = before
        if delta.finish_reason is not None:
            if self._open is None and not any(isinstance(item, OutputMessage) for item in self._items):
                yield from self._begin("message")  # every response has a message, though it may be empty
            yield from self._close("completed" if delta.finish_reason == "stop" else "incomplete")

    def _begin(self, kind: str) -> Iterator[bytes]:
        self._open = kind, f"{'rs' if kind == 'reasoning' else 'msg'}_{uuid.uuid4().hex}", ""
        place = {"output_index": len(self._items)}
        yield self._event("response.output_item.added", **place, item=self._item("in_progress", empty=True))
        if kind == "message":
            yield self._event("response.content_part.added", **self._place(), part=OutputText(""))

    def _close(self, status: Status) -> Iterator[bytes]:
        if self._open is None:
            return
        kind, _, text = self._open
        item = self._item(status)
        yield self._text_event("done", text=text)
        if kind == "message":
            yield self._event("response.content_part.done", **self._place(), part=OutputText(text))
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None

    def _item(self, status: Status, empty: bool = False) -> Item:
        assert self._open is not None
        kind, item_id, text = self._open
        if kind == "reasoning":
            return ReasoningItem(id=item_id, status=status, content=[] if empty else [ReasoningText(text)])
        return OutputMessage(id=item_id, status=status, content=[] if empty else [OutputText(text)])

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open[1], "output_index": len(self._items), "content_index": 0}

    def _text_event(self, what: str, **more: str) -> bytes:
        assert self._open is not None
        if self._open[0] == "reasoning":
            return self._event(f"response.reasoning_text.{what}", **self._place(), **more)
        return self._event(f"response.output_text.{what}", **self._place(), **more, logprobs=[])

    def _event(self, kind: str, **members: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return sse_data({"type": kind, "sequence_number": number, **members}, event=kind)

    def _ended(self, finish: FinishReason | None) -> ResponseObject:
        self._record.finish = finish
        return self._object("completed" if finish == "stop" else "incomplete")

    def _object(self, status: Status) -> ResponseObject:
        asked, record = self._asked, self._record
        prompt, output = record.prompt_tokens or 0, record.output_tokens
        cached = record.cached_tokens
        usage = ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokens(cached, prompt - cached),
            output_tokens=output,
            output_tokens_details=ReasoningTokens(self._reasoning_tokens),
            total_tokens=prompt + output,
            attention=attention_usage(record.attention, record.decode.values()),
        )
        wanted = None if asked.text is None else asked.text.format
        return ResponseObject(
            id=self.id,
            created_at=self._created,
            status=status,
            incomplete_details=Incomplete("max_output_tokens") if status == "incomplete" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            model=asked.model,
            output=self._items,
            parallel_tool_calls=asked.parallel_tool_calls,
            service_tier=asked.service_tier or UNSET,
            reasoning={"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
            temperature=self._sampling.temperature,
            text={
                "format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
            },
            top_p=self._sampling.top_p,
            usage=None if status == "in_progress" else usage,
        )
