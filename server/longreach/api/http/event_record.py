"""The events of a stream, held so that a later caller may read them again from any place, within bounds of bytes."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator

from longreach.errors import UnavailableError

# Events of one stream, and of all. The oldest are dropped, of all streams those of the one that holds most.
_RECORD_BYTES = 32 << 20
_ALL_BYTES = 256 << 20


class EventMemory:
    """What the records of a server hold together, as long as anybody refers to them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._records: weakref.WeakSet[EventRecord] = weakref.WeakSet()

    def add(self, record: EventRecord) -> None:
        """Count what a record holds."""
        self._records.add(record)

    def count(self, more: int) -> None:
        """So much more is held, or less. If that is too much, the record that holds most drops its oldest events."""
        self.num_bytes += more
        while more > 0 and self.num_bytes > _ALL_BYTES:
            max(self._records, key=lambda one: one.num_bytes).drop_oldest()


class EventRecord:
    """The events of one stream, while it goes on and for a while after. Each is sent with its number as its `id`.

    Attributes:
        begin: the number of the first event that there ever was.
        first: the number of the oldest event that is still held.
        num_bytes: what the events take.
        ended: no event will follow.
    """

    def __init__(self, memory: EventMemory, cure: str, *, prefix: str = "", begin: int = 0) -> None:
        """`cure` is what a caller can do who wants events that are not held any more; ids begin with `prefix`."""
        self.begin = self.first = begin
        self.num_bytes = 0
        self.ended = False
        self._memory = memory
        memory.add(self)
        self._cure = cure
        self._prefix = prefix
        self._events: deque[bytes] = deque()
        self._news = asyncio.Event()

    def tell(self, event: bytes) -> None:
        """Another event has come."""
        self._events.append(event)
        self._count(len(event))
        while self.num_bytes > _RECORD_BYTES and len(self._events) > 1:
            self.drop_oldest()
        self._wake()

    def drop_oldest(self) -> None:
        """Let go of the oldest event."""
        self.first += 1
        self._count(-len(self._events.popleft()))

    def end(self) -> None:
        """No event will follow."""
        self.ended = True
        self._wake()

    def after(self, event_id: str) -> int | None:
        """The number of the event after the one with this id; None if no event of this record has that id."""
        number = event_id.removeprefix(self._prefix)
        if not event_id.startswith(self._prefix) or not (number.isascii() and number.isdigit()) or len(number) > 10:
            return None
        return int(number) + 1

    async def follow(self, first: int | None = None) -> AsyncGenerator[bytes, None]:
        """The events from the number `first` on, or from the very first, those that are to come included.

        Raises:
            UnavailableError: some of them are not held any more.
        """
        at = self.begin if first is None else first
        while True:
            news = self._news
            if at < self.first:
                raise UnavailableError(
                    f"The events before {self.first} are not held any more; {self._cure}.",
                    code="events_dropped",
                    retry=False,
                )
            if at < self.first + len(self._events):
                at += 1
                yield f"id: {self._prefix}{at - 1}\n".encode() + self._events[at - 1 - self.first]
            elif self.ended:
                return
            else:
                await news.wait()

    async def until_ended(self) -> None:
        """Wait until no event will follow."""
        while not self.ended:
            await self._news.wait()

    def __del__(self) -> None:
        self._memory.count(-self.num_bytes)

    def _count(self, more: int) -> None:
        self.num_bytes += more
        self._memory.count(more)

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
