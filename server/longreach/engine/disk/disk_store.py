"""The disk tier: entries of the KV cache in files, written and read by threads beside the steps.

One thread of the engine calls everything here, and nothing here waits for the disk. Work is handed to a thread that
writes and deletes, in order, and to some that read. `done` tells what has come of it. A disk that is full, read-only or
fails costs entries and a line of the log, never a request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from longreach.engine.disk import entry_file, folder_lock
from longreach.engine.disk.disk_index import DiskIndex
from longreach.engine.disk.entry_file import Contents, DamagedEntryError
from longreach.engine.stats import DiskStats

logger = logging.getLogger(__name__)

_READERS = 8  # a checksum runs at some GB/s on one core, a drive at ten
_REST_SECONDS = 30.0  # without writing, after a write has failed
_MOST_QUEUED_BYTES = 1 << 30  # that wait to be written, until there should come no more
_PREFIX = "kv1-"


class Done(NamedTuple):
    """A piece of work that is over: that an entry was written or, `is_read`, read into its parts, or could not be."""

    key: bytes
    is_read: bool
    ok: bool


@dataclass
class DiskCounts:
    """What has happened since the start; bytes are those of contents."""

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    evicted: int = 0
    damaged: int = 0  # files whose checksum was wrong
    refused: int = 0  # entries that were not written, since there was no room or the disk was resting
    failed: int = 0  # operations that the system refused


class DiskStore:
    """Files of at most `most_bytes` below `folder`, of which those in `namespace` are used.

    A namespace stands for everything that the contents depend on beside their key: the model with its revision, the
    dtype, the layout, the rank. What other namespaces left behind makes room as it ages.

    Where another process has the folder and this one `waits`, nothing is there and nothing is kept until that ends.

    Raises:
        ValueError: the folder cannot be made, or another process uses it; the message names the cure.
    """

    def __init__(self, folder: Path, namespace: str, most_bytes: int, *, waits: bool = False) -> None:
        self.counts = DiskCounts()
        self._folder = folder
        self._namespace = _PREFIX + namespace
        self._index = DiskIndex(most_bytes)
        self._lock = folder_lock.opened(folder)  # None where nothing can be written
        self._rests_until = 0.0
        self._queued_bytes = 0
        self._done: queue.SimpleQueue[tuple[Done, int, Exception | None]] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[list[tuple[str, int, int]]] = queue.SimpleQueue()
        self._is_ours = folder_lock.take(self._lock, folder, waits=waits)
        self._over = threading.Event()
        self._waiter = threading.Thread(target=self._await_folder, name="disk-folder", daemon=True)
        if self._is_ours:
            self._begin(_files(folder, time.time_ns()))
        else:
            self._waiter.start()
        self._reads: dict[bytes, Future[None]] = {}
        self._readers = ThreadPoolExecutor(_READERS, "disk-reader")
        self._writer = threading.Thread(target=self._write_all, name="disk-writer", daemon=True)
        self._writer.start()

    def __contains__(self, key: bytes) -> bool:
        """Whether an entry can be read."""
        return self._path(key) in self._index

    def __len__(self) -> int:
        """Entries, of all namespaces."""
        return len(self._index)

    @property
    def bytes(self) -> int:
        """Bytes that all files take."""
        return self._index.bytes

    @property
    def stats(self) -> DiskStats:
        """What is there, and what has happened to it."""
        sizes = {"bytes": self.bytes, "most_bytes": self._index.most_bytes, "entries": len(self)}
        return DiskStats(**sizes, **dataclasses.asdict(self.counts))

    @property
    def is_resting(self) -> bool:
        """Whether nothing is written for a while, since a write has failed."""
        return time.monotonic() < self._rests_until

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that more should wait elsewhere."""
        return self._queued_bytes >= _MOST_QUEUED_BYTES

    def admits(self, size: int, used: int) -> bool:
        """Whether an entry of so many bytes, that was used then, would be written if there is room for it."""
        return self._keeps and self._index.admits(size + entry_file.HEADER_BYTES, used)

    def write(
        self,
        key: bytes,
        parts: Sequence[Contents],
        ready: Callable[[], object] | None = None,
        used: int | None = None,
    ) -> bool:
        """Begin to write an entry, whose `parts` must not change until `done` has it; False if it is not kept.

        It was `used` then, see `last_use`; None: now. `ready` waits until the parts are what is to be written; the
        thread that writes calls it.
        """
        path, size = self._path(key), sum(memoryview(part).nbytes for part in parts)
        if path in self._index:
            return False
        used = time.time_ns() if used is None else used
        gone = self._index.add(path, size + entry_file.HEADER_BYTES, used) if self._keeps else None
        if gone is None:
            self.counts.refused += 1
            return False
        self._queued_bytes += size
        self._delete(gone)
        write = partial(entry_file.write, used=used)
        self._work.put(lambda: self._run(Done(key, is_read=False, ok=True), size, write, parts, ready))
        return True

    def use(self, uses: Iterable[tuple[bytes, int]]) -> None:
        """Note when entries, as far as they are here, were used, see `last_use`."""
        if late := self._index.note_uses((self._path(key), used) for key, used in uses):
            self._work.put(lambda: self._renew(late))

    def used(self, key: bytes) -> int:
        """When an entry that is here was used."""
        return self._index.last_use(self._path(key))

    def read(
        self, key: bytes, parts: Sequence[bytearray | memoryview], ready: Callable[[], object] | None = None
    ) -> None:
        """Begin to read an entry that is here into `parts`, which are not to be looked at until `done` has it.

        `ready` waits until nobody else uses the parts; the thread that reads calls it.
        """
        self._index.use(self._path(key))
        size = sum(memoryview(part).nbytes for part in parts)
        done = Done(key, is_read=True, ok=True)
        self._reads[key] = self._readers.submit(self._run, done, size, entry_file.read, parts, ready)

    def give_up(self, keys: Sequence[bytes]) -> None:
        """Do not read these, as far as that has not begun; `done` tells of them as of what could not be read."""
        for key in keys:
            if key in self._reads and self._reads[key].cancel():
                self._done.put((Done(key, is_read=True, ok=False), 0, None))

    def done(self) -> list[Done]:
        """What has come to its end since the last call."""
        if not self._is_ours and not self._found.empty():
            self._is_ours = True
            self._begin(self._found.get())
        found: list[Done] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._settled(*self._done.get_nowait()))
        return found

    def pin(self, keys: Sequence[bytes]) -> None:
        """Let these go last, as often as they are pinned, whether they are here or come."""
        self._index.pin(map(self._path, keys))

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Take back one `pin` of each of these; those that nobody pins any more go first, in this order."""
        self._index.unpin([self._path(key) for key in keys])

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete entries that are here and that nobody reads."""
        paths = [path for path in map(self._path, keys) if path in self._index]
        for path in paths:
            self._index.remove(path)
        self._delete(paths)

    def close(self) -> None:
        """Finish what has been begun, and let others use the folder."""
        self._over.set()
        if self._waiter.is_alive():
            self._waiter.join()
        unsaved = self._index.unsaved() if self._is_ours else []
        self._work.put(lambda: self._renew(unsaved))
        self._work.put(None)
        self._writer.join()
        self._readers.shutdown()
        if self._lock is not None:
            os.close(self._lock)

    def check(self) -> None:
        """Assert what holds of the entries at any time."""
        self._index.check()

    @property
    def _keeps(self) -> bool:
        return self._is_ours and not self.is_resting

    def _begin(self, files: list[tuple[str, int, int]]) -> None:
        """Take in what is there."""
        self._delete(self._index.found(files))
        if len(self._index):
            logger.info("found %d entries, %.1f MB, on disk", len(self._index), self._index.bytes / 1e6)

    def _await_folder(self) -> None:
        """In a thread: have the folder once the process that has it ends, which no thread needs to be told."""
        assert self._lock is not None
        if folder_lock.wait(self._lock, self._folder, self._over):
            self._found.put(_files(self._folder, time.time_ns()))

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._namespace}/{name[:2]}/{name}"

    def _delete(self, paths: list[str]) -> None:
        """Hand files to the thread that writes: they are gone before what took their place is there."""
        self.counts.evicted += len(paths)
        for path in paths:
            self._work.put(lambda path=path: self._unlink(path))

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(OSError):  # a file that stays is found, and counted, at the next start
            (self._folder / path).unlink()

    def _renew(self, files: Sequence[tuple[str, int]]) -> None:
        """Have files tell when they were used: the order of uses outlives the process."""
        for path, used in files:
            with contextlib.suppress(OSError):  # it is gone, or can only be read
                os.utime(self._folder / path, ns=(max(0, used), max(0, used)))

    def _write_all(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _run(
        self,
        done: Done,
        size: int,
        work: Callable[..., None],
        parts: Sequence[Contents],
        ready: Callable[[], object] | None = None,
    ) -> None:
        """In one of the threads: write or read one file."""
        path = self._folder / self._path(done.key)
        try:
            if ready is not None:
                ready()
            if not done.is_read:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            work(path, parts)
        except Exception as error:  # noqa: BLE001 - whatever it was, a device's of `ready` too: who waits is told
            self._done.put((done._replace(ok=False), size, error))
        else:
            self._done.put((done, size, None))

    def _settled(self, done: Done, size: int, error: Exception | None) -> Done:
        path = self._path(done.key)
        if done.is_read:
            del self._reads[done.key]
            self._index.used(path)
            self.counts.read += done.ok
            self.counts.read_bytes += size * done.ok
        else:
            self._queued_bytes -= size
            self.counts.written += done.ok
            self.counts.written_bytes += size * done.ok
        if error is None and not done.is_read:
            self._index.written(path)
        elif error is not None:
            self._failed(done, error)
        return done

    def _failed(self, done: Done, error: Exception) -> None:
        path = self._path(done.key)
        if isinstance(error, DamagedEntryError):
            self.counts.damaged += 1
            logger.warning("%s; it is deleted, and read again from its tokens", error)
        else:
            self.counts.failed += 1
            if not done.is_read:
                self._rests_until = time.monotonic() + _REST_SECONDS
            what = "read from" if done.is_read else "written to"
            logger.warning("a KV entry could not be %s %s: %s", what, self._folder, error)
        if done.is_read and not isinstance(error, OSError | DamagedEntryError):
            return  # `ready` failed, which the file cannot help
        self._index.remove(path)
        if done.is_read:
            self._work.put(lambda: self._unlink(path))


def _files(folder: Path, now: int) -> list[tuple[str, int, int]]:
    """Path, size and last use of each entry that is there; by a clock that is behind it was used now. What was not
    finished is deleted."""
    found: list[tuple[str, int, int]] = []
    for entry in _scanned(folder):
        path = os.path.relpath(entry.path, folder)
        if entry.name.endswith(entry_file.UNFINISHED):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
            continue
        about = entry.stat(follow_symlinks=False)
        found.append((path, about.st_size, min(about.st_mtime_ns, now)))
    return found


def _scanned(folder: Path) -> Iterator[os.DirEntry[str]]:
    for namespace in os.scandir(folder):
        if namespace.name.startswith(_PREFIX) and namespace.is_dir(follow_symlinks=False):
            for part in os.scandir(namespace.path):
                if part.is_dir(follow_symlinks=False):
                    yield from (entry for entry in os.scandir(part.path) if entry.is_file(follow_symlinks=False))
