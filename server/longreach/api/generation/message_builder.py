"""The form of an answer in Anthropic's protocol: a message of blocks, and the events of its stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from longreach.api.generation.answer import AnswerBuilder
from longreach.api.generation.attention_usage import attention_usage
from longreach.api.generation.chat_answer import PartReader
from longreach.api.generation.choices import RunningAnswers
from longreach.api.generation.text_stream import TextDelta
from longreach.api.generation.usage import cache_usage, places_usage, rope_usage
from longreach.api.http.sse import ANTHROPIC_STREAM, StreamForm
from longreach.api.schema.answers.messages import (
    ContentBlock,
    MessageObject,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ThinkingTokens,
    ToolUseBlock,
)
from longreach.api.schema.requests.message_turns import signature_of
from longreach.api.schema.requests.messages import MessageRequest
from longreach.api.service.call import Call
from longreach.text.parts import Part, ToolCall

Kind = Literal["text", "thinking", "tool_use"]
Event = tuple[str, dict[str, Any]]

_KINDS: dict[str, Kind] = {"content": "text", "reasoning": "thinking"}
_DELTAS: dict[Kind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageBuilder(AnswerBuilder[MessageRequest]):
    """One message while it grows, and the events that tell of it.

    `fills_context` says that the answer may have fewer tokens than the request allows, since the context has no more.
    """

    def __init__(self, call: Call[MessageRequest], reader: PartReader, *, fills_context: bool) -> None:
        super().__init__(call, "msg_")
        self._reader = reader
        self._fills_context = fills_context
        self._own_stops = {*call.body.stop, *call.body.stop_sequences}
        self._blocks: list[ContentBlock] = []
        self._kind: Kind | None = None  # of the block that is being written
        self._pieces: list[str] = []  # of its text
        self._call: ToolCall | None = None
        self._thinking_tokens = 0
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None

    @property
    def stream_form(self) -> StreamForm:
        """As `AnswerBuilder.stream_form`."""
        return ANTHROPIC_STREAM

    async def whole(self, answers: RunningAnswers) -> MessageObject:
        """As `AnswerBuilder.whole`."""
        async for _ in self._block_events(answers):
            pass
        return self._object()

    async def events(self, answers: RunningAnswers) -> AsyncGenerator[bytes, None]:
        """As `AnswerBuilder.events`: named events of the message and its blocks.

        The first of them waits for the engine's first word, since it tells how much of the prompt was cached.
        """
        begun = False
        async with contextlib.aclosing(self._block_events(answers)) as told:
            async for name, members in told:
                if not begun:
                    begun = True
                    yield await self._event("message_start", message=self._object(begins=True))
                if name:
                    yield await self._event(name, **members)
        yield await self._event(
            "message_delta",
            delta={"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence},
            usage=self._usage(),
            **({} if self._managed is UNSET else {"context_management": self._managed}),
        )
        yield await self._event("message_stop")

    async def _block_events(self, answers: RunningAnswers) -> AsyncGenerator[Event, None]:
        """The events of the blocks, after an empty one that says that the engine has begun."""
        async with contextlib.aclosing(answers.deltas) as deltas:
            async for _, delta in deltas:
                yield "", {}
                for event in self._advance(delta):
                    yield event
                if self._stop_reason is not None:
                    return

    def _advance(self, delta: TextDelta) -> Iterator[Event]:
        """Take in a delta; the events that tell of it."""
        before = self._record.output_tokens
        parts = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *self._reader.flush(delta.finish_reason)]
        for part in parts:
            yield from self._take(part)
        if self._kind == "thinking":
            self._thinking_tokens = before
        if delta.finish_reason is not None or self._reader.is_over:
            yield from self._close()
            self._end(delta)

    def _take(self, part: Part) -> Iterator[Event]:
        if part.call is not None:
            yield from self._close()
            yield from self._open("tool_use", part.call)
        elif part.kind == "call_end":
            yield from self._close(whole=True)
        elif part.kind == "arguments":
            yield self._more(part.text)
        else:
            kind = _KINDS[part.kind]
            if self._kind != kind:
                yield from self._close()
                yield from self._open(kind)
            if kind == "thinking" and self._body.hides_thinking:
                self._pieces.append(part.text)
            else:
                yield self._more(part.text)

    def _open(self, kind: Kind, call: ToolCall | None = None) -> Iterator[Event]:
        self._kind, self._call, self._pieces = kind, call, []
        if call is not None:
            block: dict[str, Any] = {"type": kind, "id": call.id, "name": call.name, "input": {}}
        elif kind == "thinking":
            block = {"type": kind, "thinking": "", "signature": ""}
        else:
            block = {"type": kind, "text": ""}
        yield "content_block_start", {"index": len(self._blocks), "content_block": block}

    def _more(self, text: str) -> Event:
        assert self._kind is not None, "a part of a block that nothing has begun"
        self._pieces.append(text)
        kind, name = _DELTAS[self._kind]
        return "content_block_delta", {"index": len(self._blocks), "delta": {"type": kind, name: text}}

    def _close(self, *, whole: bool = False) -> Iterator[Event]:
        """End the block that is being written, if any. A call that is not `whole` is words in the whole answer."""
        if self._kind is None:
            return
        index, text = len(self._blocks), "".join(self._pieces)
        if self._kind == "thinking":
            hidden = self._body.hides_thinking
            signature = signature_of(text if hidden else "")
            delta = {"type": "signature_delta", "signature": signature}
            yield "content_block_delta", {"index": index, "delta": delta}
            self._blocks.append(ThinkingBlock("" if hidden else text, signature))
        elif self._call is not None and whole:
            self._blocks.append(ToolUseBlock(self._call.id, self._call.name, msgspec.Raw(text.encode())))
        else:
            self._blocks.append(TextBlock(text))
        yield "content_block_stop", {"index": index}
        self._kind = self._call = None

    def _end(self, delta: TextDelta) -> None:
        finish = "stop" if delta.finish_reason is None else delta.finish_reason
        if finish == "length":
            self._stop_reason = "model_context_window_exceeded" if self._fills_context else "max_tokens"
        elif self._reader.has_tool_calls:
            self._stop_reason = "tool_use"
        elif delta.stop in self._own_stops:
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop
        else:
            self._stop_reason = "end_turn"
        self.finish = "tool_calls" if self._stop_reason == "tool_use" else finish

    async def _event(self, name: str, **members: Any) -> bytes:
        return await self._told({"type": name, **members}, name)

    def _object(self, *, begins: bool = False) -> MessageObject:
        left_out = self._body.tools_left_out
        return MessageObject(
            id=self.id,
            model=self._body.model,
            content=[] if begins else self._blocks,
            stop_reason=None if begins else self._stop_reason,
            stop_sequence=None if begins else self._stop_sequence,
            usage=self._usage(),
            context_management=UNSET if begins else self._managed,
            tools_left_out=left_out or UNSET,
        )

    @property
    def _managed(self) -> dict[str, list[Any]] | msgspec.UnsetType:
        return UNSET if self._body.context_management is None else {"applied_edits": []}

    def _usage(self) -> MessageUsage:
        record = self._record
        return MessageUsage(
            input_tokens=(record.prompt_tokens or 0) - record.cached_tokens,
            cache_read_input_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            output_tokens_details=ThinkingTokens(self._thinking_tokens),
            service_tier="batch" if self._body.service_tier == "flex" else "standard",
            attention=attention_usage(record.attention, record.decode.values()),
            cache=cache_usage(record),
            rope_factor=rope_usage(record),
            places=places_usage(record),
        )
