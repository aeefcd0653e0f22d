"""The form of a response's answer: OpenAI's newer objects, and the events of their stream."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from msgspec import UNSET

from longreach.api.generation.answer import AnswerBuilder
from longreach.api.generation.attention_usage import attention_usage
from longreach.api.generation.chat_answer import PartReader
from longreach.api.generation.choices import RunningAnswers
from longreach.api.generation.text_stream import TextDelta
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
    ResponseObject,
    ResponseUsage,
    Status,
)
from longreach.api.schema.requests.responses import ResponseRequest
from longreach.api.service.call import Call


class ResponseBuilder(AnswerBuilder[ResponseRequest]):
    """One response while it grows: items of reasoning and words, and the events that tell of them."""

    def __init__(self, call: Call[ResponseRequest], reader: PartReader) -> None:
        super().__init__(call, "resp_")
        self._reader = reader
        self._sampling = call.body.sampling(call.engine.info.vocab_size, 0, call.service.sampling_defaults)
        self._items: list[Item] = []
        self._open: tuple[str, str, str] | None = None  # kind, id and text of the item that is being written
        self._reasoning_tokens = 0
        self._sequence = 0

    async def whole(self, answers: RunningAnswers) -> ResponseObject:
        """As `AnswerBuilder.whole`."""
        async with contextlib.aclosing(answers.deltas) as deltas:
            async for _, delta in deltas:
                for _ in self._advance(delta):
                    pass
        return self._ended()

    async def events(self, answers: RunningAnswers) -> AsyncGenerator[bytes, None]:
        """As `AnswerBuilder.events`: named events of the response and its items."""
        yield self._event("response.created", response=self._object("in_progress"))
        yield self._event("response.in_progress", response=self._object("in_progress"))
        async with contextlib.aclosing(answers.deltas) as deltas:
            async for _, delta in deltas:
                for event in self._advance(delta):
                    yield event
        whole = self._ended()
        yield self._event(f"response.{whole.status}", response=whole)

    def _advance(self, delta: TextDelta) -> Iterator[bytes]:
        """Take in a delta; the events that tell of it."""
        before = self._record.output_tokens
        self.finish = delta.finish_reason
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

    def _ended(self) -> ResponseObject:
        return self._object("completed" if self.finish == "stop" else "incomplete")

    def _object(self, status: Status) -> ResponseObject:
        body, record = self._body, self._record
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
        wanted = None if body.text is None else body.text.format
        return ResponseObject(
            id=self.id,
            created_at=self._created,
            status=status,
            incomplete_details=Incomplete("max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            output=self._items,
            parallel_tool_calls=body.parallel_tool_calls,
            service_tier=body.service_tier or UNSET,
            reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            temperature=self._sampling.temperature,
            text={
                "format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
            },
            top_p=self._sampling.top_p,
            usage=None if status == "in_progress" else usage,
        )
