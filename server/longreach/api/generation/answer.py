"""How every generating endpoint ends: its answers are planned, run, and sent whole or as a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from msgspec import UNSET
from starlette.responses import Response

from longreach.api.generation.choices import RunningAnswers, run_answers
from longreach.api.generation.plan_answers import AnswerSpec, plan_answers
from longreach.api.http.respond import long_json_response
from longreach.api.http.sse import OPENAI_STREAM, EventStream, StreamForm, long_sse_data
from longreach.api.schema.requests.sampling import SamplingFields
from longreach.api.service.call import Call

M = TypeVar("M", bound=SamplingFields)
T = TypeVar("T")


class AnswerBuilder(ABC, Generic[M]):
    """Gives the answers to one call the form of its endpoint; made when the answers are planned.

    Attributes:
        id: the answer's id, whose beginning is the endpoint's.
        engine_id: what the ids of its requests to the engine begin with.
        finish: how the answers ended, as the log tells it; known when the last of them has ended.
    """

    def __init__(self, call: Call[M], id_prefix: str, name: str | None = None) -> None:
        """`name` is what the caller wants the id to end in."""
        self.id = f"{id_prefix}{name or uuid.uuid4().hex}"
        # Two requests may come with one name.
        self.engine_id = self.id if name is None else f"{self.id}-{uuid.uuid4().hex}"
        self.finish: str | None = None
        self._body = call.body
        self._record = call.record
        self._tokenizer = call.tokenizer
        self._writing = call.service.writing
        self._created = int(time.time())

    @property
    def stream_form(self) -> StreamForm:
        """What a stream has beside the builder's events."""
        return OPENAI_STREAM

    @abstractmethod
    async def whole(self, answers: RunningAnswers) -> object:
        """The whole answer as one object."""

    @abstractmethod
    def events(self, answers: RunningAnswers) -> AsyncGenerator[bytes, None]:
        """The answer as Server-Sent Events."""

    async def _told(self, value: object, event: str | None = None) -> bytes:
        """An event of the stream; a long one is encoded in a thread."""
        return await long_sse_data(value, self._writing, self._record.caller, event)

    async def _written(self, work: Generator[None, None, T]) -> T:
        """What work that may be long returns, done in a thread."""
        return await self._writing.run(work, caller=self._record.caller)

    def _members(self) -> dict[str, Any]:
        """What every object of this answer says of itself."""
        return {
            "id": self.id,
            "created": self._created,
            "model": self._body.model,
            "service_tier": self._body.service_tier or UNSET,
        }


async def answer(call: Call[M], builder: AnswerBuilder[M], spec: AnswerSpec) -> Response:
    """Answer a call, whole or as a stream, as its body says.

    Raises:
        ApiError, EngineError: the answers are refused, or fail before anything of them is sent.
        ClientGoneError: the caller went away.
    """
    call.record.answering(builder.id, sum(map(len, spec.prompts)))
    if call.body.bad_words:
        words = call.service.reading.call(call.tokenizer.bad_words, call.body.bad_words, caller=call.record.caller)
        spec = replace(spec, bad_words=await call.attend(words))
    answers = run_answers(call, await plan_answers(call, builder.engine_id, spec))
    if call.body.stream:
        keep_alive = call.service.settings.keep_alive_seconds
        return EventStream(
            builder.events(answers),
            call.record,
            keep_alive,
            call.service.until_cut,
            lambda: builder.finish,
            builder.stream_form,
        )

    async def whole() -> Response:
        return await long_json_response(await builder.whole(answers), call.service.writing, call.record.caller)

    response = await call.attend(whole())
    call.record.finished(builder.finish)
    return response
