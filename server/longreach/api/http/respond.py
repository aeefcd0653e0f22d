"""Sending an answer, whole or as a stream, and what all of them tell of their progress and cost."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.generation.attention_usage import attention_usage
from longreach.api.generation.text_stream import Ask
from longreach.api.http.error_answers import ClientGoneError
from longreach.api.http.race import race, until_gone
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.sse import EventStream
from longreach.api.schema.answers.usage import CachedTokens, PromptProgress, Usage
from longreach.api.schema.requests.sampling import ChoiceFields
from longreach.api.service.metered_engine import MeteredEngine
from longreach.api.service.service import Service


def json_response(value: object, status: int = 200) -> Response:
    """A msgspec object as an answer."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def whole_response(
    request: Request, service: Service, record: RequestRecord, work: Coroutine[Any, Any, object]
) -> Response:
    """The result of `work` as an answer, unless the caller goes away or the server has to end first."""
    try:
        whole = await race(work, until_gone(request.receive), service.until_cut())
    except ClientGoneError:
        record.finish = "disconnected"
        return Response(status_code=499)  # for the log; nobody reads it
    return json_response(whole)


def stream_response(service: Service, record: RequestRecord, events: AsyncGenerator[bytes, None]) -> Response:
    """A stream of events."""
    return EventStream(events, record, service.settings.keep_alive_seconds, service.until_cut)


def usage_of(record: RequestRecord) -> Usage:
    """What has been read and written so far."""
    prompt, output = record.prompt_tokens or 0, record.output_tokens
    cached = CachedTokens(record.cached_tokens)
    return Usage(prompt, output, prompt + output, cached, attention_usage(record.attention, record.decode.values()))


class StreamExtras:
    """What chunks carry beside text, as the request's `stream_options` and `return_progress` say."""

    def __init__(self, asked: ChoiceFields, record: RequestRecord, engine: MeteredEngine, asks: Sequence[Ask]) -> None:
        options = asked.stream_options
        self.last_usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        self.progress = asked.return_progress
        self._record = record
        self._engine = engine
        self._reading = [ask.request.request_id for ask in asks if ask.leads]
        self._told = -1

    @property
    def usage(self) -> Usage | msgspec.UnsetType | None:
        """The `usage` of a chunk in mid-stream."""
        if self._continuous:
            return usage_of(self._record)
        return None if self.last_usage else msgspec.UNSET

    def new_progress(self) -> PromptProgress | None:
        """How far the prompts have been read, if that was asked for and is news."""
        done, total = self._record.computed_tokens, self._record.prompt_tokens or 0
        if not self.progress or done == self._told:
            return None
        self._told = done
        left = [self._engine.seconds_to_read(name) for name in self._reading]
        known = [seconds for seconds in left if seconds is not None]
        return PromptProgress(
            total=total,
            cache=self._record.cached_tokens,
            processed=done,
            time_ms=int((time.monotonic() - self._record.started) * 1000),
            eta_ms=0 if done == total else round(sum(known) * 1000) if known else None,
        )
