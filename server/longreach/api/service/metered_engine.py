"""An engine that is measured: what each request to it took goes to the metrics and, as spans, to the traces."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

from opentelemetry import trace

from longreach.api.service.engine_protocol import EngineProtocol
from longreach.engine.admission import Place
from longreach.engine.looks import Looked
from longreach.engine.messages import DENSE, AttentionPolicy, Generate, Started
from longreach.engine.stats import Stats
from longreach.engine.updates import Update
from longreach.metrics import Metrics, Timeline

_tracer = trace.get_tracer("longreach")


class MeteredEngine(EngineProtocol):
    """Does what its engine does, and measures the requests that go through `generate`."""

    def __init__(self, engine: EngineProtocol, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock

    @property
    def info(self) -> Started:
        """As `EngineProtocol.info`."""
        return self._engine.info

    @property
    def stats(self) -> Stats:
        """As `EngineProtocol.stats`."""
        return self._engine.stats

    @property
    def alive(self) -> bool:
        """As `EngineProtocol.alive`."""
        return self._engine.alive

    @property
    def responsive(self) -> bool:
        """As `EngineProtocol.responsive`."""
        return self._engine.responsive

    @property
    def unread_tokens(self) -> int:
        """As `EngineProtocol.unread_tokens`."""
        return self._engine.unread_tokens

    def admit(
        self,
        places: Mapping[str, Place],
        attention: AttentionPolicy = DENSE,
        caller: str = "",
        *,
        again: bool = False,
    ) -> None:
        """As `EngineProtocol.admit`."""
        self._engine.admit(places, attention, caller, again=again)

    def release(self, request_ids: Iterable[str]) -> None:
        """As `EngineProtocol.release`."""
        self._engine.release(request_ids)

    def seconds_to_read(self, request_id: str) -> float | None:
        """As `EngineProtocol.seconds_to_read`."""
        return self._engine.seconds_to_read(request_id)

    async def pin(
        self,
        name: str,
        prompt: list[int],
        cache_salt: str = "",
        attention: AttentionPolicy = DENSE,
        rope_factor: float = 0.0,
    ) -> None:
        """As `EngineProtocol.pin`."""
        await self._engine.pin(name, prompt, cache_salt, attention, rope_factor)

    async def unpin(self, name: str) -> None:
        """As `EngineProtocol.unpin`."""
        await self._engine.unpin(name)

    async def look(
        self,
        prompt: Sequence[int],
        cache_salt: str = "",
        attention: AttentionPolicy = DENSE,
        rope_factor: float = 0.0,
        *,
        max_tokens: int = 1,
        answers: int = 1,
        priority: int = 0,
        flexible: bool = False,
        caller: str = "",
    ) -> Looked:
        """As `EngineProtocol.look`."""
        return await self._engine.look(
            prompt,
            cache_salt,
            attention,
            rope_factor,
            max_tokens=max_tokens,
            answers=answers,
            priority=priority,
            flexible=flexible,
            caller=caller,
        )

    async def stop(self) -> None:
        """As `EngineProtocol.stop`."""
        await self._engine.stop()

    async def generate(self, request: Generate, arrived: float | None = None) -> AsyncGenerator[Update, None]:
        """As `EngineProtocol.generate`.

        `arrived` is when the HTTP request came in, by the engine's clock; without it, times count from this call.
        """
        sent = self._clock()
        line = Timeline(len(request.prompt), request.max_tokens, sent if arrived is None else arrived, sent)
        reason = "error"
        self._metrics.sent(line)
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as updates:
                async for update in updates:
                    self._note(line, update, goes_on=bool(request.drawn))
                    if update.finish_reason is not None:
                        reason = update.finish_reason
                    yield update
        except GeneratorExit:
            # The reader closed the stream before its end. Unless its task was cancelled, it found a stop string.
            if reason == "error":
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

    async def read_ahead(self, request: Generate) -> AsyncGenerator[Update, None]:
        """As `EngineProtocol.generate`, for a prompt that nobody waits for: what is said of requests does not count it.

        What it computes is counted by itself.
        """
        read = 0
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as updates:
                async for update in updates:
                    read = update.computed - update.cached
                    yield update
        finally:
            self._metrics.read_ahead(read)

    def _note(self, line: Timeline, update: Update, *, goes_on: bool) -> None:
        """Take in an update; the first token here of an answer that `goes_on` after an engine's death is no first."""
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
            if not goes_on:
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
