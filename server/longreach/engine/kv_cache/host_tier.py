"""How entries of the cache leave the device for host memory, and come back: one path for pages and copies of states.

The pools say what they evict, what they will evict soon, and what a request wants back. What has to be copied for that
is collected, and taken once a step. Nobody finds an entry that comes back before its copy has been issued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from longreach.engine.kv_cache.offload_index import CacheMoves, Copy, HostIndex

if TYPE_CHECKING:
    from longreach.engine.kv_cache.disk_tier import DiskTier


class _Restored(NamedTuple):
    copy: Copy
    arrived: Callable[[], object]


class HostTier:
    """Host memory of `num_places` pages, or fewer of them and copies of states, which take `state_places` each."""

    def __init__(self, num_places: int, state_places: int = 0) -> None:
        self.index = HostIndex(num_places, state_places)
        self.disk: DiskTier | None = None  # what is kept below
        self._evicted: list[Copy] = []
        self._saved: list[Copy] = []
        self._restored: dict[bytes, _Restored] = {}

    def __contains__(self, name: bytes) -> bool:
        """Whether the entry with this key is here."""
        return name in self.index

    @property
    def tiers(self) -> list[HostIndex | DiskTier]:
        """Host memory, and what is kept below, if anything is."""
        return [self.index] if self.disk is None else [self.index, self.disk]

    @property
    def num_restoring(self) -> int:
        """Places whose contents come back, since the last `launched`."""
        return sum(len(restored.copy.places) for restored in self._restored.values())

    def is_restoring(self, name: bytes) -> bool:
        """Whether the entry with this key comes back, since the last `launched`."""
        return name in self._restored

    def evict(self, name: bytes, at: int, depth: int = 0, used: int | None = None) -> None:
        """Keep an entry whose page, or with a `depth` slot, `at` is about to be written to; as far as there is room. It
        was `used` then, see `last_use`; None: now."""
        if (places := self.index.save(name, depth, used)) is not None:
            self._evicted.append(Copy(at, places, depth > 0))

    def save_ahead(self, name: bytes, at: int, depth: int = 0, used: int | None = None) -> None:
        """As `evict`, of an entry that stays where it is for this step, beside which it is copied."""
        if (places := self.index.save(name, depth, used)) is not None:
            self._saved.append(Copy(at, places, depth > 0))

    def pass_through(self, name: bytes, at: int, depth: int, used: int) -> None:
        """As `save_ahead`, of an entry that is copied for the disk."""
        self.save_ahead(name, at, depth, used)
        if name in self.index:
            self.index.spare(name)

    def pin(self, names: Iterable[bytes]) -> None:
        """See that these entries, which are here, stay until `take`, whatever is evicted for what takes them up."""
        for name in names:
            self.index.load(name)

    def restore(self, name: bytes, at: int, arrived: Callable[[], object], *, is_state: bool = False) -> None:
        """Bring an entry back to a page or slot; `arrived` is called once others may find it there."""
        self._restored[name] = _Restored(Copy(at, self.index.load(name), is_state), arrived)
        self.index.spare(name)

    def remove(self, names: Iterable[bytes]) -> None:
        """See that nobody gets what is kept under these keys."""
        names = list(names)
        for name in names:
            self.index.remove(name)
        if self.disk is not None:
            self.disk.remove(names)

    def take(self, unclean: list[int]) -> CacheMoves:
        """What has to be copied for the step that has been planned, since the last call, and pages to be cleaned."""
        moves = CacheMoves(self._evicted, unclean, [restored.copy for restored in self._restored.values()], self._saved)
        self.index.unpin()
        self._evicted, self._saved = [], []
        return moves

    def launched(self) -> None:
        """The copies of the last `take` are on their way: steps to come may read what comes back."""
        for restored in self._restored.values():
            restored.arrived()
        self._restored.clear()

    def failed(self, moves: CacheMoves) -> None:
        """The copies of the last `take` failed: nobody gets them."""
        copies = moves.evicted + moves.restored + moves.saved
        self.index.remove_places(place for copy in copies for place in copy.places)
        self._restored.clear()

    def check(self) -> None:
        """Assert that every place is accounted for, and that all that comes back has been issued."""
        self.index.check()
