"""Responses that go on without their callers: their tasks, and the events that a later caller may read again."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from longreach.api.http.event_record import EventRecord

log = logging.getLogger(__name__)

# Events of all responses that have ended.
_ENDED_BYTES = 16 << 20


class BackgroundRun:
    """One response while it is made, and for a while after.

    Attributes:
        snapshot: the response's object as it is now.
        events: its events, if they are held.
    """

    def __init__(self, run_id: str, owner: str, snapshot: Callable[[], Any], events: EventRecord | None) -> None:
        self.id = run_id
        self.owner = owner
        self.snapshot = snapshot
        self.events = events
        self.task: asyncio.Task[None] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Let its task end. Once: another cancellation would cut off what writes that it has ended."""
        if self.task is not None and not self._cancelled:
            self._cancelled = True
            self.task.cancel()

    def tell(self, event: bytes) -> None:
        """Another event has come."""
        if self.events is not None:
            self.events.tell(event)


class BackgroundRuns:
    """All of them, by their ids."""

    def __init__(self) -> None:
        self._running: dict[str, BackgroundRun] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._ended: OrderedDict[str, tuple[BackgroundRun, EventRecord]] = OrderedDict()

    def start(self, run: BackgroundRun, work: Coroutine[Any, Any, None]) -> None:
        """Let `work` make the response; it ends by itself or is cancelled."""
        self._running[run.id] = run
        run.task = asyncio.create_task(work, name=f"background {run.id}")
        run.task.add_done_callback(lambda task: self._over(run, task))

    def attend(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that begins responses, until it has ended or `stop` ends it."""
        task = asyncio.create_task(work, name="background")
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def running(self, owner: str, run_id: str) -> BackgroundRun | None:
        """A response that is being made."""
        run = self._running.get(run_id)
        return run if run is not None and run.owner == owner else None

    def events(self, owner: str, run_id: str) -> EventRecord | None:
        """The events of a response, being made or not, if they are held."""
        if (run := self.running(owner, run_id)) is not None:
            return run.events
        ended, events = self._ended.get(run_id, (None, None))
        return events if ended is not None and ended.owner == owner else None

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
        if self.events(owner, run_id) is not None and run_id in self._ended:
            del self._ended[run_id]

    async def stop(self) -> None:
        """End all of them."""
        others = [*self._others]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        tasks = [run.task for run in self._running.values() if run.task is not None]
        for run in self._running.values():
            run.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _over(self, run: BackgroundRun, task: asyncio.Task[None]) -> None:
        del self._running[run.id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background response %s failed", run.id, exc_info=error)
        if run.events is not None:
            run.events.end()
            self._ended[run.id] = run, run.events
            while sum(events.num_bytes for _, events in self._ended.values()) > _ENDED_BYTES:
                del self._ended[next(iter(self._ended))]  # who reads them at this moment reads on
