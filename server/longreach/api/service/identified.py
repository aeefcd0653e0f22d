"""Requests that name themselves, by the header `Idempotency-Key`: each is answered once, whoever asks for it again.

Such a request outlives its connection for a while. The caller who sends it again, with the same key and the same body,
gets the same answer from the same run: it is neither read nor drawn a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from longreach.api.http.event_record import EventMemory, EventRecord
from longreach.errors import ApiError, HttpError, UnavailableError

log = logging.getLogger(__name__)

# What all answers take that have ended; each counts as so much at least.
_ENDED_BYTES = 64 << 20
_LEAST_BYTES = 2 << 10
_NAME_BYTES = 6


@dataclass(frozen=True)
class WholeAnswer:
    """An answer that is one piece of JSON, as it was made: its status, its headers, and its pieces."""

    status: int
    headers: list[tuple[bytes, bytes]]
    pieces: list[bytes]


class IdentifiedRun:
    """One identified request while it is answered, and for a while after.

    Attributes:
        owner: whose key it came with.
        digest: of where it was sent and of its body.
        events: of its answer, where that is a stream.
        failed: its answer ended in an error: who sends the request again wants another.
    """

    def __init__(self, owner: str, key: str, digest: bytes, memory: EventMemory) -> None:
        self.owner = owner
        self.key = key
        self.digest = digest
        self.failed = False
        prefix = f"{secrets.token_hex(_NAME_BYTES)}-"  # another run's events have other ids
        self.events = EventRecord(memory, "send the request with another Idempotency-Key", prefix=prefix)
        self.task: asyncio.Task[None] | None = None
        self.attached = 0
        self._begun: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def begin(self, answer: object) -> None:
        """The answer has begun: a `WholeAnswer`, or what those need to know who send a stream."""
        self._begun.set_result(answer)

    def refuse(self, error: Exception) -> None:
        """There will be no answer."""
        self.failed = True
        if not self._begun.done():
            self._begun.set_exception(error)
            self._begun.exception()  # perhaps nobody is there to hear of it

    async def answer(self) -> Any:
        """What it was begun with, once it is.

        Raises:
            ApiError: there is none.
        """
        return await asyncio.shield(self._begun)

    @property
    def num_bytes(self) -> int:
        """What is held of its answer, about."""
        begun = self._begun.result() if self._begun.done() and not self._begun.exception() else None
        whole = sum(map(len, begun.pieces)) if isinstance(begun, WholeAnswer) else 0
        return max(self.events.num_bytes + whole, _LEAST_BYTES)


def cancelled_error() -> ApiError:
    """What those are told who still wait for a run that was ended."""
    headers = {"x-should-retry": "false"}
    return HttpError("This request has been ended by its caller.", code="cancelled", status=409, headers=headers)


class IdentifiedRuns:
    """All of them, by owner and key. A run goes on for `seconds` without a caller; its answer is held as long after its
    end, or after its last caller has left."""

    def __init__(self, seconds: float, memory: EventMemory) -> None:
        self._seconds = seconds
        self._memory = memory
        self._runs: dict[tuple[str, str], IdentifiedRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[str, dict[IdentifiedRun, int]] = {}  # by owner, runs that have ended: what their answers take
        self._bytes: Counter[str] = Counter()
        self._timers: dict[IdentifiedRun, asyncio.TimerHandle] = {}

    def find(self, owner: str, key: str) -> IdentifiedRun | None:
        """The run of this key, if there is one."""
        return self._runs.get((owner, key))

    def start(
        self, owner: str, key: str, digest: bytes, work: Callable[[IdentifiedRun], Coroutine[Any, Any, None]]
    ) -> IdentifiedRun:
        """Let `work` answer a request; it ends by itself or is cancelled. It takes the place of what has failed."""
        run = IdentifiedRun(owner, key, digest, self._memory)
        self._forget(self._runs.get((owner, key)))
        self._runs[owner, key] = run
        run.task = asyncio.create_task(work(run), name=f"identified request {key}")
        self._tasks.add(run.task)
        run.task.add_done_callback(lambda task: self._over(run, task))
        return run

    @contextlib.contextmanager
    def attached(self, run: IdentifiedRun) -> Iterator[None]:
        """Inside, a caller waits for the run."""
        run.attached += 1
        self._stop_timer(run)
        try:
            yield
        finally:
            run.attached -= 1
            if not run.attached:
                self._start_timer(run)

    async def end(self, owner: str, key: str) -> bool:
        """End a run, and forget its answer; False if there is none."""
        run = self._runs.get((owner, key))
        if run is None:
            return False
        self._forget(run)
        if run.task is not None and not run.task.done():
            run.task.cancel()
            await asyncio.wait([run.task])
        return True

    async def stop(self) -> None:
        """End all of them."""
        for run in [*self._runs.values()]:
            self._forget(run)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _over(self, run: IdentifiedRun, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            run.refuse(cancelled_error())
        elif (error := task.exception()) is not None:
            log.error("identified request %s failed", run.key, exc_info=error)
            run.refuse(UnavailableError("The request failed.", code="internal_error", retry=False))
        run.events.end()
        if run.failed and not run.events.num_bytes:
            self._forget(run)  # nothing was told: who sends it again begins anew
        elif not run.attached:
            self._start_timer(run)
        if self.find(run.owner, run.key) is run:
            self._hold(run, run.num_bytes)

    def _hold(self, run: IdentifiedRun, size: int) -> None:
        """Hold the answer of a run that has ended. What is full forgets the oldest, of the owner who holds the most."""
        self._held.setdefault(run.owner, {})[run] = size
        self._bytes[run.owner] += size
        while self._bytes.total() > _ENDED_BYTES:
            [(owner, _)] = self._bytes.most_common(1)
            self._forget(next(iter(self._held[owner])))

    def _start_timer(self, run: IdentifiedRun) -> None:
        self._stop_timer(run)
        if self.find(run.owner, run.key) is run:
            self._timers[run] = asyncio.get_running_loop().call_later(self._seconds, self._give_up, run)

    def _stop_timer(self, run: IdentifiedRun) -> None:
        if (timer := self._timers.pop(run, None)) is not None:
            timer.cancel()

    def _give_up(self, run: IdentifiedRun) -> None:
        """Nobody has come back."""
        self._forget(run)
        if run.task is not None:
            run.task.cancel()

    def _forget(self, run: IdentifiedRun | None) -> None:
        if run is not None:
            self._stop_timer(run)
            if self.find(run.owner, run.key) is run:
                del self._runs[run.owner, run.key]
            if run in (held := self._held.get(run.owner, {})):
                self._bytes[run.owner] -= held.pop(run)
                if not held:
                    del self._held[run.owner], self._bytes[run.owner]
