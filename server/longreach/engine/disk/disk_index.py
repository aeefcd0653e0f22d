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
_RENEWED_AFTER = 60 * 10**9  # nanoseconds after which a file's time is set to its last use


def taken(size: int) -> int:
    """Bytes that a file of `size` bytes takes on disk."""
    return -(-size // BLOCK) * BLOCK


@dataclass
class _Entry:
    bytes: int
    ready: bool  # it has been written
    saved: int  # the last use that its file tells of
    readers: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether it is written or read, and has to stay."""
        return not self.ready or self.readers > 0


class DiskIndex:
    """Entries of at most `most_bytes` together; of those that nobody reads the one used longest ago goes first, see
    `last_use`, and pinned ones go last."""

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

    def found(self, files: Iterable[tuple[str, int, int]]) -> list[str]:
        """Take in files that are there at the start: path, size, and when each was used.

        Returns:
            The paths that have to be deleted, for they are more than the bound allows.
        """
        for path, size, used in files:
            self._entries[path] = _Entry(taken(size), ready=True, saved=used)
            self.bytes += taken(size)
            self._use(path, used)
        return self._make_room(0) or []

    def admits(self, size: int, used: int) -> bool:
        """Whether a file that was used then might find room: something that was used before goes first."""
        wanted = taken(size)
        if self._busy + wanted > self.most_bytes:
            return False
        return self.bytes + wanted <= self.most_bytes or self._oldest(used, []) is not None

    def add(self, path: str, size: int, used: int | None = None) -> list[str] | None:
        """Make room for a file that will be written, and that was `used` then; None: now.

        Returns:
            The paths that have to be deleted before; None if the file is known already, if there is no room for it, or
            if what would go for it was used later: of a prompt that is larger than the disk the beginning stays.
        """
        wanted = taken(size)
        if path in self._entries or self._busy + wanted > self.most_bytes:
            return None
        if (gone := self._make_room(wanted, used)) is None:
            return None
        self._entries[path] = entry = _Entry(wanted, ready=False, saved=0)
        self._use(path, used)
        entry.saved = self._order.used(path)
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

    def note_uses(self, uses: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Note when entries, as far as they are here, were used; the paths whose files ought to tell of it, and when
        these were used."""
        late: list[tuple[str, int]] = []
        for path, used in uses:
            if (entry := self._entries.get(path)) is not None:
                self._use(path, used)
                if entry.ready and used - entry.saved >= _RENEWED_AFTER:
                    late.append(self._saved(path, entry))
        return late

    def unsaved(self) -> list[tuple[str, int]]:
        """As `note_uses`, of all files that tell of an earlier use than their last, or of a later one."""
        return [
            self._saved(path, entry)
            for path, entry in self._entries.items()
            if entry.ready and entry.saved != self._order.used(path)
        ]

    def last_use(self, path: str) -> int:
        """When an entry that is here was used."""
        return self._order.used(path)

    def use(self, path: str) -> None:
        """Somebody reads an entry: it stays until `used`."""
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
                self._use(path, self._order.used(path))

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

    def _make_room(self, wanted: int, used: int | None = None) -> list[str] | None:
        """The entries that go for so many bytes; None, changing nothing, if one of them was used later than that."""
        gone: list[str] = []
        excess = self.bytes + wanted - self.most_bytes
        while excess > 0:
            if (oldest := self._oldest(used, gone)) is None:
                return None
            gone.append(oldest)
            excess -= self._entries[oldest].bytes
        for path in gone:
            self.remove(path)
        return gone

    def _oldest(self, used: int | None, gone: list[str]) -> str | None:
        """The entry that goes next, behind those that are `gone`, for one that was used then; None if all were used
        later."""
        oldest = self._order.first(lambda path: self._entries[path].is_busy or path in gone)
        return None if oldest is None or (used is not None and self._order.used(oldest) > used) else oldest

    def _saved(self, path: str, entry: _Entry) -> tuple[str, int]:
        entry.saved = self._order.used(path)
        return path, entry.saved

    def _use(self, path: str, used: int | None) -> None:
        self._order.use(path, used=used, pinned=self._pins[path] > 0)
