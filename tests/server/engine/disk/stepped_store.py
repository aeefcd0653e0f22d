"""The store of the disk tier without its threads: the same files, written and read when a test says so, in any order.

What simulated pages and states contain is pickled into the places of host memory that stand for them.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from longreach.engine.disk import entry_file
from longreach.engine.disk.disk_store import DiskStore, Done

from tests.server.engine.simulation import SimulatedRunner

PLACE_BYTES = 400


class Parts(list[bytearray]):
    """The memory of some places."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__(bytearray(PLACE_BYTES) for _ in places)
        self.places = places

    def put(self, entry: Any) -> None:
        """Fill the memory with an entry, over and over again."""
        contents = _repeated(pickle.dumps(entry), PLACE_BYTES * len(self))
        for at, part in enumerate(self):
            part[:] = contents[at * PLACE_BYTES : (at + 1) * PLACE_BYTES]

    def entry(self) -> Any:
        """What the memory contains; damage anywhere is found out."""
        contents = b"".join(self)
        entry = pickle.loads(contents)
        assert contents == _repeated(pickle.dumps(entry), len(contents)), "damage was not noticed"
        return entry


def _repeated(contents: bytes, length: int) -> bytes:
    assert len(contents) <= length, "an entry is larger than its places"
    return (contents * (length // len(contents) + 1))[:length]


class _Job(NamedTuple):
    work: Callable[[], None]
    after: int  # the move before which it does not run


class _Jobs:
    """In place of a thread's queue, and of a pool of threads."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner
        self.waiting: list[_Job] = []

    def put(self, work: Callable[[], None] | None) -> None:
        """As `SimpleQueue.put`, in the order in which files are written and deleted."""
        if work is not None:
            # Copies beside a step are made before the move after it.
            self.waiting.append(_Job(work, self._runner.moves + 1))

    def submit(self, work: Callable[..., None], *args: Any) -> Future[None]:
        """As `Executor.submit`: what is cancelled before it is run is not."""
        future: Future[None] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                work(*args)

        self.put(run)
        return future

    def run(self, at: int) -> bool:
        """Run one, if it may."""
        if at >= len(self.waiting) or self._runner.moves < self.waiting[at].after:
            return False
        self.waiting.pop(at).work()
        return True


class SteppedStore(DiskStore):
    """As `DiskStore`, and as `disk_tier.PlaceMemory` over the host memory of a `runner`.

    `speed` is how many files are written or read between two looks, at most. While the disk `is_full` the system
    refuses to write, at any byte of a file.
    """

    def __init__(self, runner: SimulatedRunner, folder: Path, most_bytes: int, speed: int) -> None:
        self._runner = runner
        self._speed = speed
        self._random = random.Random(speed)
        self.is_full = False
        self._parts: dict[bytes, Parts] = {}
        super().__init__(folder, "a", most_bytes)
        self._writer.join()
        while not self._work.empty():  # what made room at the start
            work = self._work.get()
            assert work is not None
            work()
        self._readers.shutdown()
        self._writes, self._read_jobs = _Jobs(runner), _Jobs(runner)
        self._work: Any = self._writes
        self._readers: Any = self._read_jobs

    @property
    def is_resting(self) -> bool:
        """As `DiskStore.is_resting`: simulated time does not know for how long."""
        return False

    def _write_all(self) -> None:
        """The thread that writes has nothing to do."""

    def contents(self, places: tuple[int, ...]) -> Parts:
        """As `PlaceMemory.contents`."""
        return Parts(places)

    def settled(self) -> Callable[[], object]:
        """Nobody has to wait: files are written and read after the next move."""
        return lambda: None

    def write(
        self,
        key: bytes,
        parts: Sequence[Any],
        ready: Callable[[], object] | None = None,
        used: int | None = None,
    ) -> bool:
        """As `DiskStore.write`; what the places contain is looked at as late as may be."""
        assert ready is not None
        assert isinstance(parts, Parts)
        return super().write(key, parts, lambda: parts.put(self._runner.host_entry(parts.places)), used)

    def read(self, key: bytes, parts: Sequence[Any], ready: Callable[[], object] | None = None) -> None:
        """As `DiskStore.read`."""
        assert ready is not None
        assert isinstance(parts, Parts)
        self._parts[key] = parts
        super().read(key, parts)

    def done(self) -> list[Done]:
        """As `DiskStore.done`, after some files have been written and read."""
        for _ in range(self._random.randint(0, self._speed)):
            if self._random.random() < 0.5 or not self._read_jobs.waiting:
                self._write_next()
            else:
                self._read_jobs.run(self._random.randrange(len(self._read_jobs.waiting)))
        found = super().done()
        for done in found:
            if done.is_read:
                parts = self._parts.pop(done.key)
                if done.ok:
                    self._runner.set_host_entry(parts.places, parts.entry())
        return found

    def _write_next(self) -> None:
        whole = entry_file._write_whole
        if self.is_full:
            left = self._random.randrange(2 * PLACE_BYTES)

            def refuse(descriptor: int, part: Any) -> None:
                nonlocal left
                if left < len(part):
                    whole(descriptor, memoryview(part)[:left])
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                left -= len(part)
                whole(descriptor, part)

            entry_file._write_whole = refuse
        try:
            self._writes.run(0)
        finally:
            entry_file._write_whole = whole

    def die(self) -> None:
        """The process ends: what is under way is lost, and the folder is free."""
        assert self._lock is not None
        os.close(self._lock)
