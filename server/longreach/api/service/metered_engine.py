"""An engine that is watched: what each request to it took goes to the metrics and, as spans, to the traces."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from opentelemetry import trace

from longreach.api.http.request_log import RequestRecord
from longreach.engine.messages import Generate, Update
from longreach.metrics import Metrics, Timeline

if TYPE_CHECKING:
    from longreach.api.service.service import Engine

# The HTTP request that a task works for.
current_record: contextvars.ContextVar[RequestRecord] = contextvars.ContextVar("current_record")

_tracer = trace.get_tracer("longreach")


class MeteredEngine:
    """Does what its engine does, and measures it."""

    def __init__(self, engine: Engine, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def generate(self, request: Generate) -> AsyncGenerator[Update, None]:
        """As `Engine.generate`."""
        sent = self._clock()
        record = current_record.get(None)
        line = Timeline(len(request.prompt), request.max_tokens, sent if record is None else record.started, sent)
        reason = "error"
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as updates:
                async for update in updates:
                    self._note(line, update)
                    if update.finish_reason is not None:
                        reason = update.finish_reason
                    yield update
        except GeneratorExit:
            if reason == "error":  # closed by its reader before the end: who was not cancelled has found a stop string
                task = asyncio.current_task()
                reason = "abort" if task is not None and task.cancelling() else "stop"
            raise
        except asyncio.CancelledError:
            reason = "abort"
            raise
        finally:
            if line.decode is not None:
                self._metrics.decode(line.decode)
            self._metrics.ended(line, self._clock(), reason)
            self._trace(line, request.request_id, reason)

    def _note(self, line: Timeline, update: Update) -> None:
        line.waited, line.cached = update.waited, update.cached
        if update.attention is not None:
            self._metrics.attention(update.attention)
        if update.decode is not None:
            line.decode = update.decode
        if not update.tokens:
            return
        now = self._clock()
        if line.first_token is None:
            line.first_token = now
            self._metrics.first_token(line)
        else:
            self._metrics.token(line.prompt_tokens, now - line.last_token)
        line.last_token = now
        line.output_tokens += len(update.tokens)

    def _trace(self, line: Timeline, request_id: str, reason: str) -> None:
        parent = trace.get_current_span()
        if not parent.is_recording():
            return
        # Spans have the time of the day; the timeline's clock has no relation to it but this one.
        now, today = self._clock(), time.time_ns()
        ends = [
            ("queue", line.sent, line.started),
            ("prefill", line.started, line.first_token),
            ("decode", line.first_token, line.last_token or None),
        ]
        for name, start, end in ends:
            if start is None:
                break
            span = _tracer.start_span(name, start_time=today + round((start - now) * 1e9))
            span.set_attribute("longreach.engine_request_id", request_id)
            span.end(today + round(((now if end is None else end) - now) * 1e9))
        parent.set_attributes(
            {
                "gen_ai.response.id": request_id,
                "gen_ai.usage.input_tokens": line.prompt_tokens,
                "gen_ai.usage.cached_input_tokens": line.cached,
                "gen_ai.usage.output_tokens": line.output_tokens,
                "gen_ai.response.finish_reasons": [reason],
            }
        )
