"""The form of a response's answer: OpenAI's newer objects, and the events of their stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET

from longreach.api.generation.answer import AnswerBuilder
from longreach.api.generation.attention_usage import attention_usage
from longreach.api.generation.chat_answer import PartReader
from longreach.api.generation.choices import RunningAnswers
from longreach.api.generation.logprob_objects import TokenNames, chat_logprobs
from longreach.api.generation.text_stream import TextDelta
from longreach.api.generation.usage import cache_usage, places_usage, rope_usage
from longreach.api.http.error_answers import as_api_error
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.sse import OPENAI_STREAM, StreamForm
from longreach.api.responses.open_item import Event, Kind, OpenItem
from longreach.api.schema.answers.chat import TokenLogprob
from longreach.api.schema.answers.responses import (
    Incomplete,
    InputTokens,
    Item,
    ItemStatus,
    ReasoningItem,
    ReasoningTokens,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    Status,
)
from longreach.api.schema.requests.responses import ResponseRequest
from longreach.api.service.call import Call
from longreach.errors import ApiError
from longreach.text.parts import Part

# Keeps a response that has ended, and says whether it is kept.
Keep = Callable[[ResponseObject], Awaitable[bool]]

# Codex gives a stream up after five minutes without an event.
_SILENT_SECONDS = 60.0
_PREFIX = "resp_"
_LABELS = ("prompt_cache_key", "safety_identifier", "user")
_OPEN: tuple[Status, ...] = ("queued", "in_progress")


@dataclass(frozen=True)
class Again:
    """A response that is begun again: its id, when it was created, and the number of its first event."""

    response_id: str
    created: int
    first_event: int


class ResponseBuilder(AnswerBuilder[ResponseRequest]):
    """One response while it grows: items of reasoning, words and calls, and the events that tell of them.

    `keep` is called with the response once it has been completed, before its end is told. One that is begun `again`
    keeps its id.

    Attributes:
        status: that of the response.
    """

    def __init__(
        self, call: Call[ResponseRequest], reader: PartReader, keep: Keep | None = None, again: Again | None = None
    ) -> None:
        super().__init__(call, _PREFIX, None if again is None else again.response_id.removeprefix(_PREFIX))
        self.status: Status = "queued" if call.body.background else "in_progress"
        self._service = call.service
        self._reader = reader
        self._keep = keep
        self._stored = keep is not None
        self._names = TokenNames(call.tokenizer, as_ids=False)
        self._sampling = call.body.sampling(call.engine.info.vocab_size, 0, call.service.sampling_defaults)
        self._tools = {tool.shown: tool for tool in call.body.offered}
        self._items: list[Item] = []
        self._open: OpenItem | None = None
        self._blank = ""  # blank space that is told if words follow
        self._logprobs: list[TokenLogprob] = []  # of tokens whose words are not told yet
        self._reasoning_tokens = 0
        self._sequence = 0
        if again is not None:
            self._created, self._sequence = again.created, again.first_event
        self._completed: int | None = None
        self._telling = asyncio.Lock()
        self._last_told = time.monotonic()  # when the last event was
        self._failure: ResponseFailure | None = None

    async def whole(self, answers: RunningAnswers) -> ResponseObject:
        """As `AnswerBuilder.whole`."""
        async with contextlib.aclosing(answers.deltas) as deltas:
            async for _, delta in deltas:
                for _ in self._advance(delta):
                    pass
                if self.finish is not None:
                    break
        return await self._ended()

    async def events(self, answers: RunningAnswers) -> AsyncGenerator[bytes, None]:
        """As `AnswerBuilder.events`: named events of the response and its items.

        Raises:
            ApiError: the response failed, which the last event says, too.
        """
        yield await self._event("response.created", {"response": self.object()})
        if self.status == "queued":
            yield await self._event("response.queued", {"response": self.object()})
        self.status = "in_progress"
        yield await self._event("response.in_progress", {"response": self.object()})
        try:
            async with contextlib.aclosing(answers.deltas) as deltas:
                async for _, delta in deltas:
                    for event in self._advance(delta):
                        yield await self._event(*event)
                    if self.finish is not None:
                        break
            whole = await self._ended()
        except Exception as error:
            if self.status == "in_progress" and self._body.background and self._service.leaves_unfinished:
                raise  # it has not failed: the next server begins again
            api_error = as_api_error(error, self._record.request_id)
            yield await self.fail(api_error)
            raise api_error from None
        yield await self._event(f"response.{whole.status}", {"response": whole})

    @property
    def stream_form(self) -> StreamForm:
        """As `AnswerBuilder.stream_form`; readers that wait for events and hear no comments have one a minute."""
        return replace(OPENAI_STREAM, keep_alive=self._keep_alive)

    async def _keep_alive(self, record: RequestRecord) -> bytes:
        if time.monotonic() - self._last_told < _SILENT_SECONDS:
            return await OPENAI_STREAM.keep_alive(record)
        return await self._event("response.in_progress", {"response": self.object()})

    async def fail(self, error: ApiError) -> bytes:
        """The response has failed; the event that says so."""
        self.status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status < 500 else None
        self._failure = ResponseFailure(code or "server_error", error.message)
        return await self._event("response.failed", {"response": self.object()})

    def cancel(self) -> None:
        """The response has been cancelled; what there is of it stays."""
        self.status = "cancelled"
        if self._open is not None:
            self._items.append(self._open.item("incomplete"))
            self._open = None

    def object(self) -> ResponseObject:
        """The response as it is now."""
        body = self._body
        wanted = None if body.text is None else body.text.format
        labels: dict[str, Any] = {name: getattr(body, name) or UNSET for name in _LABELS}
        form = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
        text: dict[str, Any] = {"format": form}
        if body.text is not None and body.text.verbosity is not None:
            text["verbosity"] = body.text.verbosity
        return ResponseObject(
            id=self.id,
            created_at=self._created,
            completed_at=self._completed,
            status=self.status,
            background=body.background,
            error=self._failure,
            incomplete_details=Incomplete("max_output_tokens") if self.status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=body.model,
            output=[*self._items],
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id,
            service_tier=body.service_tier or UNSET,
            reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            store=self._stored,
            temperature=self._sampling.temperature,
            text=text,
            tool_choice="auto" if body.tool_choice is None else body.tool_choice.given,
            tools=[*body.tools.given],
            tools_left_out=[*body.tools.left_out] or UNSET,
            top_logprobs=body.top_logprobs or 0,
            top_p=self._sampling.top_p,
            truncation=body.truncation or "disabled",
            usage=None if self.status in _OPEN else self._usage(),
            **labels,
        )

    def _advance(self, delta: TextDelta) -> Iterator[Event]:
        """Take in a delta; the events that tell of it."""
        self.status = "in_progress"
        before = self._record.output_tokens
        if self._body.logprobs is not None:
            if not self._blank and (self._open is None or self._open.kind != "message"):
                self._logprobs = []  # of reasoning, of calls, and of the marks around them
            self._logprobs += chat_logprobs(self._names, delta.logprobs).content
        parts = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._reader.flush(delta.finish_reason)
        for part in parts:
            yield from self._take(part)
        if self._open is not None and self._open.kind == "reasoning":
            self._reasoning_tokens = before
        self.finish = "stop" if self._reader.is_over else delta.finish_reason
        if self.finish is not None:
            yield from self._finish("completed" if self.finish == "stop" else "incomplete")

    def _take(self, part: Part) -> Iterator[Event]:
        if part.kind == "call":
            assert part.call is not None, "a call's first part has its id"
            tool = self._tools.get(part.call.name)
            kind = "custom_tool_call" if tool is not None and tool.kind == "custom" else "function_call"
            yield from self._begin(OpenItem(kind, part.call, tool))
        elif part.kind == "arguments":
            assert self._open is not None, "arguments follow their call"
            yield from self._open.add(part.text, [])
        elif part.kind == "call_end":
            yield from self._close("completed")
        else:
            yield from self._write("reasoning" if part.kind == "reasoning" else "message", part.text)

    def _write(self, kind: Kind, text: str) -> Iterator[Event]:
        """More reasoning or words. Blank space between other items makes no message."""
        if self._open is None or self._open.kind != kind:
            text = self._blank + text
            if kind == "message" and text.isspace() and (self._items or self._open is not None):
                self._blank = text
                return
            yield from self._begin(OpenItem(kind))
        assert self._open is not None, "it has just begun"
        logprobs, self._logprobs = self._logprobs, []
        yield from self._open.add(text, logprobs if kind == "message" else [])

    def _begin(self, item: OpenItem) -> Iterator[Event]:
        # A call that has not been ended by now could not be read to its end.
        yield from self._close("completed" if self._open is None or self._is_text else "incomplete")
        self._blank = ""
        self._open = item
        yield from item.begin(len(self._items))

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._open.end(status)
        self._items.append(self._open.item(status))
        self._open = None

    def _finish(self, status: ItemStatus) -> Iterator[Event]:
        """End what is open; every response has a message or a call, though the message may be empty."""
        if self._open is None and all(isinstance(item, ReasoningItem) for item in self._items):
            yield from self._begin(OpenItem("message"))
        if self._open is not None:
            yield from self._close(status if self._is_text else "incomplete")

    @property
    def _is_text(self) -> bool:
        return self._open is not None and self._open.kind in ("message", "reasoning")

    async def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        async with self._telling:  # events leave in the order of their numbers, however long one of them is encoded
            number, self._sequence = self._sequence, self._sequence + 1
            self._last_told = time.monotonic()
            return await self._told({"type": kind, "sequence_number": number, **members}, kind)

    async def _ended(self) -> ResponseObject:
        """The response at its end, once it is kept."""
        self.status = "completed" if self.finish == "stop" else "incomplete"
        if self.status == "completed":
            self._completed = int(time.time())
        if self._keep is not None:
            self._stored = await self._keep(self.object())
        return self.object()

    def _usage(self) -> ResponseUsage:
        record = self._record
        prompt, output = record.prompt_tokens or 0, record.output_tokens
        cached = record.cached_tokens
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokens(cached, prompt - cached),
            output_tokens=output,
            output_tokens_details=ReasoningTokens(self._reasoning_tokens),
            total_tokens=prompt + output,
            attention=attention_usage(record.attention, record.decode.values()),
            cache=cache_usage(record),
            rope_factor=rope_usage(record),
            places=places_usage(record),
        )
