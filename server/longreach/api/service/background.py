"""Responses that go on without their callers: their tasks, and the events that a later caller may read again."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from longreach.errors import UnavailableError

log = logging.getLogger(__name__)

# Events of one response, of which the oldest are dropped, and of all responses that have ended.
_RUN_BYTES = 32 << 20
_ENDED_BYTES = 16 << 20


class BackgroundRun:
    """One response while it is made, and for a while after.

    Attributes:
        snapshot: the response's object as it is now.
        recorded: its events are held.
        first: the number of the oldest event that is still held.
        num_bytes: what the events take.
    """

    def __init__(self, run_id: str, owner: str, snapshot: Callable[[], Any], *, recorded: bool) -> None:
        self.id = run_id
        self.owner = owner
        self.snapshot = snapshot
        self.recorded = recorded
        self.ended = False
        self.first = 0
        self.num_bytes = 0
        self._events: deque[bytes] = deque()
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._cancelled = False

    def cancel(self) -> None:
        """Let its task end. Once: another cancellation would cut off what writes that it has ended."""
        if self.task is not None and not self._cancelled:
            self._cancelled = True
            self.task.cancel()

    def tell(self, event: bytes) -> None:
        """Another event has come."""
        if not self.recorded:
            return
        self._events.append(event)
        self.num_bytes += len(event)
        while self.num_bytes > _RUN_BYTES and len(self._events) > 1:
            self.num_bytes -= len(self._events.popleft())
            self.first += 1
        self._wake()

    def end(self) -> None:
        """No event will follow."""
        self.ended = True
        self._wake()

    async def follow(self, first: int = 0) -> AsyncGenerator[bytes, None]:
        """The events from the number `first` on, those that are to come included.

        Raises:
            UnavailableError: some of them are not held any more.
        """
        at = first
        while True:
            news = self._news
            while at < self.first + len(self._events):
                if at < self.first:
                    raise UnavailableError(
                        f"The events of this response before {self.first} are not held any more; read the response.",
                        code="events_dropped",
                        retry=False,
                    )
                at += 1
                yield self._events[at - 1 - self.first]
            if self.ended:
                return
            await news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class BackgroundRuns:
    """All of them, by their ids."""

    def __init__(self) -> None:
        self._running: dict[str, BackgroundRun] = {}
        self._ended: OrderedDict[str, BackgroundRun] = OrderedDict()
        self._ended_bytes = 0

    def start(self, run: BackgroundRun, work: Coroutine[Any, Any, None]) -> None:
        """Let `work` make the response; it ends by itself or is cancelled."""
        self._running[run.id] = run
        run.task = asyncio.create_task(work, name=f"background {run.id}")
        run.task.add_done_callback(lambda task: self._over(run, task))

    def running(self, owner: str, run_id: str) -> BackgroundRun | None:
        """A response that is being made."""
        run = self._running.get(run_id)
        return run if run is not None and run.owner == owner else None

    def recorded(self, owner: str, run_id: str) -> BackgroundRun | None:
        """A response whose events can be read, being made or not."""
        run = self._running.get(run_id) or self._ended.get(run_id)
        return run if run is not None and run.owner == owner and run.recorded else None

    async def cancel(self, owner: str, run_id: str) -> bool:
        """End a response that is being made, and wait until it has ended; False if there is none."""
        run = self.running(owner, run_id)
        if run is None or run.task is None:
            return False
        run.cancel()
        await asyncio.wait([run.task])
        return True

    def forget(self, owner: str, run_id: str) -> None:
        """Let go of the events of a response that has ended."""
        if self.recorded(owner, run_id) is not None and run_id in self._ended:
            self._drop(run_id)

    async def stop(self) -> None:
        """End all of them."""
        tasks = [run.task for run in self._running.values() if run.task is not None]
        for run in self._running.values():
            run.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _over(self, run: BackgroundRun, task: asyncio.Task[None]) -> None:
        del self._running[run.id]
        run.end()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background response %s failed", run.id, exc_info=error)
        if run.recorded:
            self._ended[run.id] = run
            self._ended_bytes += run.num_bytes
            while self._ended_bytes > _ENDED_BYTES:
                self._drop(next(iter(self._ended)))

    def _drop(self, run_id: str) -> None:
        self._ended_bytes -= self._ended.pop(run_id).num_bytes
