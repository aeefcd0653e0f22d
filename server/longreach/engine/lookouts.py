"""The owner's side of looks: makes the digests of prompts, sends questions, and hands each asker its answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from longreach.engine.errors import EngineDeadError
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.looks import Look, Looked
from longreach.engine.messages import Started
from longreach.engine.rope_choice import contents_key

# Looks of one caller that are made at once: the engine answers all that it has before its next step.
_MOST_OF_ONE = 8
# Digests of fewer tokens are made sooner than a thread is found for them.
_AT_ONCE = 8192


@dataclass
class _Turns:
    """A caller's: how many ask or wait to, and who may."""

    askers: int = 0
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_OF_ONE))


class Lookouts:
    """Looks at one engine, which `send` reaches. `info` says what the digests of its pages depend on."""

    def __init__(self, info: Started, send: Callable[[Look], Awaitable[None]]) -> None:
        namespace = info.digest_namespace
        self._hasher = None if namespace is None else PageHasher(info.page_size, *namespace)
        self._send = send
        self._numbers = itertools.count()
        self._turns: dict[str, _Turns] = {}
        self._open: dict[int, asyncio.Future[Looked]] = {}
        self._gone: str | None = None

    async def look(self, question: Look, prompt: Sequence[int], cache_salt: str, caller: str) -> Looked:
        """The answer to a question without its number and digests, which are those of the `prompt`.

        A caller who asks much waits for his own answers; others do not.

        Raises:
            EngineDeadError: the engine process is gone.
        """
        turns = self._turns.setdefault(caller, _Turns())
        turns.askers += 1
        try:
            async with turns.free:
                return await self._ask(question, prompt, cache_salt)
        finally:
            turns.askers -= 1
            if not turns.askers:
                del self._turns[caller]

    async def _ask(self, question: Look, prompt: Sequence[int], cache_salt: str) -> Looked:
        key = contents_key(question.attention, question.rope_factor)
        if len(prompt) > _AT_ONCE:
            digests = await asyncio.to_thread(self._digests, prompt, cache_salt, key)
        else:
            digests = self._digests(prompt, cache_salt, key)
        if self._gone is not None:
            raise EngineDeadError(self._gone)
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(msgspec.structs.replace(question, look_id=number, digests=digests))
            return await answer
        finally:
            del self._open[number]

    def deliver(self, answer: Looked) -> None:
        """The engine has answered. Whoever asked may have gone away meanwhile."""
        future = self._open.get(answer.look_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, reason: str) -> None:
        """The engine is gone: whoever waits for an answer, or is about to ask, is told the `reason`."""
        self._gone = reason
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))

    def _digests(self, prompt: Sequence[int], salt: str, key: str) -> bytes:
        digests: list[bytes] = []
        if self._hasher is not None:
            self._hasher.extend(digests, prompt, salt, key)
        return b"".join(digests)
