"""The engine of one call, which outlives engine processes: what one that died has told is not asked of the next again.

An engine that is started in place of a dead one is sent the call's requests anew. What it finds on disk of a prompt it
need not read. An answer that had begun goes on behind the tokens that were told, as after a preemption: what is drawn
depends on the tokens before, on the seed, and on how many were drawn, and a grammar is led through them again. Where
the caller gave no seed, what follows is drawn by another, as it would be in any second request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from longreach.api.service.engine_protocol import EngineProtocol
from longreach.api.service.metered_engine import MeteredEngine
from longreach.engine.admission import Place
from longreach.engine.errors import EngineDeadError
from longreach.engine.looks import Looked
from longreach.engine.messages import DENSE, AttentionPolicy, Generate, Started
from longreach.engine.stats import Stats
from longreach.engine.updates import Update

log = logging.getLogger(__name__)

# Nobody knows which of the requests that were there an engine has died of. Each of them is tried once more, so that one
# that engines die of ends two of them.
_MOST_DEATHS = 1


class LastingEngine(EngineProtocol):
    """Does what its engine does; one that dies is followed by what `successor` gives for it.

    `successor` raises an `EngineDeadError` if there will be no other engine.
    """

    def __init__(self, engine: MeteredEngine, successor: Callable[[MeteredEngine], Awaitable[MeteredEngine]]) -> None:
        self._engine = engine
        self._successor = successor
        self._deaths = 0
        self._places: dict[str, Place] = {}  # of requests that have not ended
        self._attention: AttentionPolicy = DENSE
        self._caller = ""
        self._following = asyncio.Lock()

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
        """As `EngineProtocol.admit`; once for all requests of the call."""
        assert not self._places, "a call's requests are admitted together"
        self._engine.admit(places, attention, caller, again=again)
        self._places, self._attention, self._caller = dict(places), attention, caller

    def release(self, request_ids: Iterable[str]) -> None:
        """As `EngineProtocol.release`."""
        gone = list(request_ids)
        for request_id in gone:
            self._places.pop(request_id, None)
        self._engine.release(gone)

    def seconds_to_read(self, request_id: str) -> float | None:
        """As `EngineProtocol.seconds_to_read`."""
        return self._engine.seconds_to_read(request_id)

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

    async def stop(self) -> None:
        """As `EngineProtocol.stop`."""
        await self._engine.stop()

    async def generate(self, request: Generate, arrived: float | None = None) -> AsyncGenerator[Update, None]:
        """As `MeteredEngine.generate`; the updates are those of one answer, whichever engines they come from.

        Raises:
            EngineDeadError: there is no other engine, or several have died while the request was there.
        """
        told = _Told(request)
        try:
            while True:
                engine = self._engine
                try:
                    async with contextlib.aclosing(engine.generate(told.rest, arrived)) as updates:
                        async for update in updates:
                            if (news := told.news(update)) is not None:
                                yield news
                    return
                except EngineDeadError:
                    await self._follow(engine)
                    log.info("%s goes on behind %d tokens of its answer", request.request_id, len(told.tokens))
        finally:
            self._places.pop(request.request_id, None)

    async def _follow(self, dead: MeteredEngine) -> None:
        """Go on with the engine after `dead`, unless another request of the call has done so already."""
        async with self._following:
            if self._engine is not dead:
                return
            self._deaths += 1
            if self._deaths > _MOST_DEATHS:
                raise EngineDeadError("another engine has died with this request")
            engine = await self._successor(dead)
            if engine.info.max_model_len < dead.info.max_model_len:
                raise EngineDeadError("the next engine has a shorter context")
            engine.admit(_regrouped(self._places), self._attention, self._caller, again=True)
            self._engine = engine


class _Told:
    """What the caller was told of one request.

    Attributes:
        tokens: of its answer.
    """

    def __init__(self, request: Generate) -> None:
        self.tokens: list[int] = []
        self._request = request
        self._scored = 0  # tokens of the prompt whose log-probabilities were told
        self._scored_here = 0  # the same, by the engine that tells now
        self._last = Update(request_id=request.request_id, prompt_tokens=len(request.prompt), computed=0)
        self._goes_on = False

    @property
    def rest(self) -> Generate:
        """What is asked of the next engine."""
        self._scored_here = 0
        if not self.tokens:
            return self._request
        self._goes_on = True
        # With the first token of an answer, all of the prompt has been scored.
        return msgspec.structs.replace(self._request, drawn=[*self.tokens], prompt_logprobs=None)

    def news(self, update: Update) -> Update | None:
        """What the caller is told of an update; None where it has heard all of it."""
        if self._goes_on:
            if not update.tokens:
                return None  # the prompt was read before
            last = self._last  # what was cached of the prompt is what the engine found that drew the first token
            update = msgspec.structs.replace(
                update,
                cached=last.cached,
                cached_host=last.cached_host,
                cached_disk=last.cached_disk,
                waited=last.waited,
            )
        elif update.prompt_logprobs:
            again = min(max(self._scored - self._scored_here, 0), len(update.prompt_logprobs))
            self._scored_here += len(update.prompt_logprobs)
            self._scored = max(self._scored, self._scored_here)
            if again:
                update = msgspec.structs.replace(update, prompt_logprobs=update.prompt_logprobs[again:])
        self._last = update
        self.tokens += update.tokens
        return update


def _regrouped(places: Mapping[str, Place]) -> dict[str, Place]:
    """The places that are left: the first of those that share a prompt is the one that reads it."""
    readers: dict[str, str] = {}
    left: dict[str, Place] = {}
    for name, place in places.items():
        reader = readers.setdefault(place.copy_of or name, name)
        left[name] = replace(place, copy_of=None if reader == name else reader)
    return left
