"""The engine reads a prompt into its prefix cache while the prompt still comes.

One request of the engine reads what has come, and is followed by another with all that has come meanwhile, which
begins with the pages of the one before. Each draws one token, which nobody wants. They are flexible: prompts of others
are read first, and take over what has been read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from array import array
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from longreach.engine.admission import Place
from longreach.engine.errors import EngineDeadError, QueueFullError
from longreach.engine.messages import Generate, Sampling, Started
from longreach.engine.rope_choice import factor_for
from longreach.engine.updates import Update
from longreach.errors import UnavailableError
from longreach.policies.values import DENSE, AttentionPolicy

# By how much a prompt has to grow before the next request: by a part of the engine's chunk, so that less than a chunk
# is left at its end. A request carries its whole prompt, which takes the event loop some 20 ms for a million tokens: so
# a long prompt grows by a part of itself.
_OF_CHUNK = 1 / 4
_OF_PROMPT = 1 / 128
_LONGEST_PAUSE = 5.0
_WITHOUT_ENGINE_SECONDS = 0.25


class Engine(Protocol):
    """What is needed of the engine; the API's `MeteredEngine` has it."""

    @property
    def info(self) -> Started:
        """What the engine said when it became ready."""
        ...

    def admit(self, places: Mapping[str, Place], attention: AttentionPolicy = ..., caller: str = ...) -> None:
        """Take places in the queue, or raise a `QueueFullError`."""
        ...

    def release(self, request_ids: Iterable[str]) -> None:
        """Give places back."""
        ...

    def read_ahead(self, request: Generate) -> AsyncGenerator[Update, None]:
        """Yield the updates of one request; closing the generator cancels it."""
        ...


class Engines(Protocol):
    """The engine that there is at a moment; the API's `Service` has it."""

    def require_ready(self) -> tuple[Engine, Any]:
        """The engine, and something else.

        Raises:
            UnavailableError: there is none; with `Retry-After` where there may be one soon.
        """
        ...


class ReadAhead:
    """Reads one growing prompt. An `async with` starts it; leaving that cancels what is still being read.

    An engine that dies is waited for, and the next one reads everything again. A queue that is full is waited for, too.
    Only whole pages are read, since the rest of a page is of no use to another request; and nothing beyond the model's
    context.

    Attributes:
        read_tokens: so many of the prompt's first tokens are in the cache, or were, as the engine last said.
    """

    def __init__(
        self,
        engines: Engines,
        *,
        attention: AttentionPolicy = DENSE,
        cache_salt: str = "",
        caller: str = "",
        name: str | None = None,
    ) -> None:
        """`attention` and `cache_salt` are those of the requests that will begin with the prompt, `caller` is who
        waits in the queue, and the ids of requests begin with `name`."""
        self.read_tokens = 0
        self._expected = 0
        self._rope_factor = 0.0
        self._engines = engines
        self._attention = attention
        self._cache_salt = cache_salt
        self._caller = caller
        # Another reading of the same prompt may follow while the engine still tells of this one.
        self._name = f"{name or 'read'}-{uuid.uuid4().hex}"
        self._requests = 0
        self._engine: Engine | None = None  # that has read what was sent
        self._ids = array("i")
        self._sent = 0  # tokens of the last request that was read to its end
        self._ended = False
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ReadAhead:
        """Begin to read what is fed."""
        self._task = asyncio.create_task(self._read(), name=self._name)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel what is still being read."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # whoever did not wait for the end does not want to know

    @property
    def fed_tokens(self) -> int:
        """Tokens of the prompt that have come."""
        return len(self._ids)

    @property
    def is_done(self) -> bool:
        """Whether nothing is read any more: all is, or it failed."""
        return self._task is not None and self._task.done()

    def expect(self, tokens: int) -> None:
        """The prompt will have so many tokens, about. Rotary frequencies go by that, where they go by the length: what
        was read under others is read again."""
        self._expected = tokens

    def feed(self, ids: Sequence[int]) -> None:
        """The prompt goes on so."""
        assert not self._ended, "the prompt has ended"
        self._ids.extend(ids)
        self._news.set()

    def finish(self) -> None:
        """The prompt has ended. What is left is read without waiting for more."""
        self._ended = True
        self._news.set()

    async def end(self) -> None:
        """The prompt has ended; wait until all of it has been read.

        Raises:
            RequestFailedError: the engine could not read it.
            UnavailableError: the server is shutting down, or there will be no engine any more.
        """
        self.finish()
        assert self._task is not None, "it is started by `async with`"
        await asyncio.shield(self._task)

    async def _read(self) -> None:
        while True:
            engine = await self._ready()
            if engine is not self._engine:
                self._engine, self._sent, self.read_tokens = engine, 0, 0
            length = await self._next_length(engine.info)
            if length is None:
                return
            try:
                await self._read_up_to(engine, length)
            except EngineDeadError:
                self._engine = None
                await asyncio.sleep(_WITHOUT_ENGINE_SECONDS)
            except QueueFullError as error:
                await asyncio.sleep(min(error.retry_after, _LONGEST_PAUSE))

    async def _ready(self) -> Engine:
        while True:
            try:
                return self._engines.require_ready()[0]
            except UnavailableError as error:
                if "Retry-After" not in error.headers:
                    raise
            await asyncio.sleep(_WITHOUT_ENGINE_SECONDS)

    async def _next_length(self, info: Started) -> int | None:
        """Tokens of the next request, once enough have come; None where nothing is left to be read."""
        most = info.max_model_len - 1  # one is drawn
        unit = math.lcm(info.page_size, self._attention.query_tile)  # keys are chosen for whole tiles of queries
        while True:
            self._news.clear()
            self._choose_table(info)
            length = min(len(self._ids), most) // unit * unit
            if self._ended or length > most - unit:
                return length if length > self._sent else None
            if length - self._sent >= max(info.max_batched_tokens * _OF_CHUNK, len(self._ids) * _OF_PROMPT):
                return length
            await self._news.wait()

    def _choose_table(self, info: Started) -> None:
        """Take the rotary table of the prompt as a whole; a request with a document takes the same by its length."""
        known = len(self._ids) if self._ended else max(len(self._ids), self._expected)
        factor = factor_for(info.rope_tables, known)
        if factor != self._rope_factor:
            self._rope_factor, self._sent, self.read_tokens = factor, 0, 0

    async def _read_up_to(self, engine: Engine, length: int) -> None:
        self._requests += 1
        request = Generate(
            request_id=f"{self._name}-{self._requests}",
            prompt=self._ids[:length].tolist(),
            max_tokens=1,
            sampling=Sampling(temperature=0.0),
            flexible=True,
            cache_salt=self._cache_salt,
            attention=self._attention,
            caller=self._caller,
            rope_factor=self._rope_factor,
        )
        engine.admit({request.request_id: Place(length)}, self._attention, self._caller)
        try:
            async with contextlib.aclosing(engine.read_ahead(request)) as updates:
                async for update in updates:
                    self.read_tokens = max(self.read_tokens, update.computed)
        finally:
            engine.release([request.request_id])
        self._sent = length
