"""Which entries are on disk, how many bytes they take, and which of them goes first. Names and sizes only.

An entry is known by its path below the folder: that of its namespace, a folder of two digits, and its key in
hexadecimal digits. Entries of other namespaces (of other models, dtypes or layouts) count towards the bound, and make
room as others do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longreach.engine.kv_cache.eviction_order import EvictionOrder

BLOCK = 4096  # bytes that a file system gives at a time


def taken(size: int) -> int:
    """Bytes that a file of `size` bytes takes on disk."""
    return -(-size // BLOCK) * BLOCK


@dataclass
class _Entry:
    bytes: int
    ready: bool  # it has been written
    readers: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether it is written or read, and has to stay."""
        return not self.ready or self.readers > 0


class DiskIndex:
    """Entries of at most `most_bytes` together; of those that nobody reads the one used longest ago goes first, and
    pinned ones go last."""

    def __init__(self, most_bytes: int) -> None:
        if most_bytes < BLOCK:
            raise ValueError(f"most_bytes must be at least {BLOCK}, got {most_bytes}")
        self.most_bytes = most_bytes
        self.bytes = 0
        self._busy = 0  # of these, what cannot go: it is written or read
        self._entries: dict[str, _Entry] = {}
        self._order: EvictionOrder[str] = EvictionOrder()
        self._pins: Counter[str] = Counter()  # also of what is not here

    def __len__(self) -> int:
        """Entries, also those being written."""
        return len(self._entries)

    def __contains__(self, path: str) -> bool:
        """Whether an entry can be read."""
        entry = self._entries.get(path)
        return entry is not None and entry.ready

    def found(self, files: Iterable[tuple[str, int]]) -> list[str]:
        """Take in files that are there at the start, by path and size, the one used longest ago first.

        Returns:
            The paths that have to be deleted, for they are more than the bound allows.
        """
        for path, size in files:
            self._entries[path] = _Entry(taken(size), ready=True)
            self.bytes += taken(size)
            self._touch(path)
        gone: list[str] = []
        while self.bytes > self.most_bytes:
            gone.append(self._evict())
        return gone

    def add(self, path: str, size: int) -> list[str] | None:
        """Make room for a file that will be written.

        Returns:
            The paths that have to be deleted before; None if the file is known already or there is no room for it.
        """
        wanted = taken(size)
        if path in self._entries or self._busy + wanted > self.most_bytes:
            return None
        gone: list[str] = []
        while self.bytes + wanted > self.most_bytes:
            gone.append(self._evict())
        self._entries[path] = _Entry(wanted, ready=False)
        self._touch(path)
        self.bytes += wanted
        self._busy += wanted
        return gone

    def written(self, path: str) -> None:
        """A file is whole."""
        entry = self._entries[path]
        entry.ready = True
        self._busy -= entry.bytes

    def remove(self, path: str) -> None:
        """A file is gone, or was never written."""
        if (entry := self._entries.pop(path, None)) is not None:
            self._order.remove(path)
            self.bytes -= entry.bytes
            self._busy -= entry.bytes if entry.is_busy else 0

    def use(self, path: str) -> None:
        """Somebody reads an entry: it stays until `used`."""
        self._touch(path)
        entry = self._entries[path]
        self._busy += 0 if entry.is_busy else entry.bytes
        entry.readers += 1

    def used(self, path: str) -> None:
        """A reader is done."""
        if (entry := self._entries.get(path)) is not None:
            entry.readers -= 1
            self._busy -= 0 if entry.is_busy else entry.bytes

    def pin(self, paths: Iterable[str]) -> None:
        """Let these go last, as often as they are pinned, whether they are here or come."""
        for path in paths:
            self._pins[path] += 1
            if path in self._entries:
                self._touch(path)

    def unpin(self, paths: Sequence[str]) -> None:
        """Take back one `pin` of each of these; those that nobody pins any more go first, in this order."""
        for path in reversed(paths):
            self._pins[path] -= 1
            if not self._pins[path]:
                del self._pins[path]
                self._order.unpin(path)

    def check(self) -> None:
        """Assert that the sums are right, and within the bound."""
        assert self.bytes == sum(entry.bytes for entry in self._entries.values()), "bytes are counted wrongly"
        assert self.bytes <= self.most_bytes, "more bytes than allowed"
        assert self._busy == sum(entry.bytes for entry in self._entries.values() if entry.is_busy), "lost busy bytes"
        self._order.check()
        assert set(self._order) == self._entries.keys(), "an entry has no place in the order"
        for path, entry in self._entries.items():
            assert entry.readers >= 0, f"{path} has been given back too often"

    def _evict(self) -> str:
        oldest = next(path for path in self._order if not self._entries[path].is_busy)
        self.remove(oldest)
        return oldest

    def _touch(self, path: str) -> None:
        self._order.use(path, pinned=self._pins[path] > 0)
