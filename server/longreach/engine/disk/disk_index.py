"""Which entries are on disk, how many bytes they take, and which of them goes first. Names and sizes only.

An entry is known by its path below the folder: that of its namespace, a folder of two digits, and its key in
hexadecimal digits. Entries of other namespaces (of other models, dtypes or layouts) count towards the bound, and make
room as others do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 4096  # bytes that a file system gives at a time


def taken(size: int) -> int:
    """Bytes that a file of `size` bytes takes on disk."""
    return -(-size // BLOCK) * BLOCK


@dataclass
class _Entry:
    bytes: int
    ready: bool  # it has been written
    readers: int = 0
    pins: int = 0

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
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one used longest ago first
        self._pins: dict[str, int] = {}  # also of what is not here

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
            self._entries[path] = _Entry(taken(size), ready=True, pins=self._pins.get(path, 0))
            self.bytes += taken(size)
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
        self._entries[path] = _Entry(wanted, ready=False, pins=self._pins.get(path, 0))
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
            self.bytes -= entry.bytes
            self._busy -= entry.bytes if entry.is_busy else 0

    def use(self, path: str) -> None:
        """Somebody reads an entry: it stays until `used`."""
        self._entries.move_to_end(path)
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
            self._pins[path] = self._pins.get(path, 0) + 1
            if (entry := self._entries.get(path)) is not None:
                entry.pins += 1

    def unpin(self, paths: Iterable[str]) -> None:
        """Take back one `pin` of each of these."""
        for path in paths:
            self._pins[path] -= 1
            if not self._pins[path]:
                del self._pins[path]
            if (entry := self._entries.get(path)) is not None:
                entry.pins -= 1

    def check(self) -> None:
        """Assert that the sums are right, and within the bound."""
        assert self.bytes == sum(entry.bytes for entry in self._entries.values()), "bytes are counted wrongly"
        assert self.bytes <= self.most_bytes, "more bytes than allowed"
        assert self._busy == sum(entry.bytes for entry in self._entries.values() if entry.is_busy), "lost busy bytes"
        for path, entry in self._entries.items():
            assert entry.readers >= 0, f"{path} has been given back too often"
            assert entry.pins == self._pins.get(path, 0), f"{path} has lost a pin"

    def _evict(self) -> str:
        idle = (path for path, entry in self._entries.items() if not entry.is_busy)
        unpinned = (path for path, entry in self._entries.items() if not (entry.is_busy or entry.pins))
        oldest = next(unpinned, None) or next(idle)
        self.remove(oldest)
        return oldest
