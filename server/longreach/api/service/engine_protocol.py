"""What the API needs of an engine. `EngineClient` has it over a socket, `MeteredEngine` and
`LastingEngine` around another engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from longreach.engine.admission import Place
from longreach.engine.looks import Looked
from longreach.engine.messages import AttentionPolicy, EngineConfig, Generate, Started
from longreach.engine.stats import Stats
from longreach.engine.updates import Update


class EngineProtocol(Protocol):
    """An engine as the API sees it; `EngineClient` documents its members."""

    @property
    def info(self) -> Started:
        """What the engine said when it became ready."""
        ...

    @property
    def stats(self) -> Stats:
        """What the engine said last of its load."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the engine runs and is reachable."""
        ...

    @property
    def responsive(self) -> bool:
        """Whether the engine has given a sign of life of late."""
        ...

    @property
    def unread_tokens(self) -> int:
        """Prompt tokens of its requests that are not computed yet."""
        ...

    def admit(
        self, places: Mapping[str, Place], attention: AttentionPolicy = ..., caller: str = ..., *, again: bool = ...
    ) -> None:
        """Take a place for each request of one caller, by its id, or raise a `QueueFullError`; never if they come
        `again`."""
        ...

    def release(self, request_ids: Iterable[str]) -> None:
        """Give back the places that requests still have."""
        ...

    def seconds_to_read(self, request_id: str) -> float | None:
        """Predicted time to read the rest of a request's prompt, or None before there is a basis."""
        ...

    async def look(
        self,
        prompt: Sequence[int],
        cache_salt: str = ...,
        attention: AttentionPolicy = ...,
        rope_factor: float = ...,
        *,
        max_tokens: int = ...,
        answers: int = ...,
        priority: int = ...,
        flexible: bool = ...,
        caller: str = ...,
    ) -> Looked:
        """What a request would get from the caches now, and when its first token would come."""
        ...

    def generate(self, request: Generate) -> AsyncGenerator[Update, None]:
        """Yield the updates of one request; closing the generator cancels it."""
        ...

    async def pin(
        self,
        name: str,
        prompt: list[int],
        cache_salt: str = ...,
        attention: AttentionPolicy = ...,
        rope_factor: float = ...,
    ) -> None:
        """Have what is cached of a prompt evicted last, or raise an `EngineDeadError`."""
        ...

    async def unpin(self, name: str) -> None:
        """End a pin, if there is one of this name, or raise an `EngineDeadError`."""
        ...

    async def stop(self) -> None:
        """End the engine."""
        ...


class StartedEngine(EngineProtocol, Protocol):
    """An engine that tells its owner when it dies."""

    on_death: Callable[[], None] | None


StartEngine = Callable[[EngineConfig], Awaitable[StartedEngine]]
