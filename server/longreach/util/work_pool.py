"""Threads for work that is too long for the event loop: bounded, fair by caller, and given up when nobody waits for it.

Work is a generator that yields wherever it can be left: after each step another caller's work may have its turn, and
work whose caller has gone is not taken up again. Python's own executors know nothing of callers, and the process waits
at its end for whatever their threads still do; these are daemons, which it leaves behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from longreach.util.memory import give_back_memory
from longreach.util.shared_bytes import SharedBytes

T = TypeVar("T")

# After work of this size the process holds much that it does not need.
_LARGE_BYTES = 1024 * 1024


def done(work: Generator[None, None, T]) -> T:
    """What short work returns, done at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


class WorkPoolFullError(Exception):
    """More bytes wait already than may."""


@dataclass(eq=False)
class _Job:
    work: Generator[None, None, Any]
    caller: str
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    size: int
    wanted: bool = True


class WorkPool:
    """So many threads, started with the first work, and one queue for each caller; the callers take turns.

    `max_bytes` bounds the sizes of all work that waits or runs, with a reserve (see `SharedBytes`); None for no bound.
    """

    def __init__(self, name: str, threads: int, max_bytes: int | None = None) -> None:
        self._name = name
        self._threads = threads
        self._bytes = SharedBytes(max_bytes)
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._started = False
        self._closed = False

    @property
    def waiting_bytes(self) -> int:
        """The sizes of all work that waits or runs."""
        return self._bytes.total

    async def run(self, work: Generator[None, None, T], *, caller: str = "", size: int = 0) -> T:
        """What `work` returns. Cancelling this drops the work: at once if it waits, at its next step if it runs.

        Raises:
            WorkPoolFullError: there is no room for `size` bytes more. An empty pool takes work of any size.
        """
        if self._bytes.total and not self._bytes.fits(caller, size):
            raise WorkPoolFullError(f"{self._bytes.total} bytes are waiting already")
        loop = asyncio.get_running_loop()
        job = _Job(work, caller, loop, loop.create_future(), size)
        self._bytes.add(caller, size)
        try:
            with self._changed:
                self._start()
                self._put(job)
            return await job.future
        finally:
            self._bytes.remove(caller, size)
            with self._changed:
                job.wanted = False
                self._remove(job)

    async def call(self, function: Callable[..., T], *arguments: Any, caller: str = "", size: int = 0) -> T:
        """What a function returns, as work of one step."""

        def work() -> Generator[None, None, T]:
            return function(*arguments)
            yield

        return await self.run(work(), caller=caller, size=size)

    def close(self) -> None:
        """Begin no further step; what waits is never done."""
        with self._changed:
            self._closed = True
            self._queues.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for number in range(self._threads):
                threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()

    def _put(self, job: _Job) -> None:
        self._queues.setdefault(job.caller, deque()).append(job)
        self._changed.notify()

    def _remove(self, job: _Job) -> None:
        queue = self._queues.get(job.caller)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._queues[job.caller]

    def _take(self) -> _Job | None:
        """The next work of the caller whose turn it is; None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues or self._closed)
            if self._closed:
                return None
            caller, queue = next(iter(self._queues.items()))
            job = queue.popleft()
            self._queues.move_to_end(caller)
            if not queue:
                del self._queues[caller]
            return job

    def _serve(self) -> None:
        while (job := self._take()) is not None:
            self._step(job)
            if job.size >= _LARGE_BYTES and not self._queues:
                del job  # and with it what it has made
                give_back_memory()

    def _step(self, job: _Job) -> None:
        try:
            next(job.work)
        except StopIteration as end:
            self._tell(job, end.value, None)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._tell(job, None, error)
        else:
            with self._changed:
                if job.wanted and not self._closed:
                    self._put(job)
                    return
            job.work.close()

    def _tell(self, job: _Job, result: object, error: Exception | None) -> None:
        def settle() -> None:
            if not job.future.done():
                job.future.set_result(result) if error is None else job.future.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            job.loop.call_soon_threadsafe(settle)
