"""What is kept on disk, below host memory: which entries are written, and which are read before a request needs them.

Entries pass through host memory. What the prefix cache takes up is copied there beside the steps to come, and written
from there. A request that waits has its prefix read into host memory, see `disk_reads`, and takes it up from there as
it takes up all that is in host memory. While files are written or read, their places are held.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec

from longreach.engine.kv_cache.disk_reads import DiskReads
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.stats import DiskStats

# Entries that are looked at in one step, and bytes that are copied to be written beside it.
_MOST_LOOKED_AT = 512
_STEP_BYTES = 256 << 20
# The part of host memory that waits to be written at most: what was evicted from the device is worth more there. Two
# places at least: to one is copied while another is written from.
_WRITING_SHARE = 1 / 4
_FEWEST_WRITTEN = 2
# An answer leaves a state behind every few pages, and drops the one before: only one that has stayed is written.
_STATE_SECONDS = 5.0

Places = tuple[int, ...]


class Done(Protocol):
    """`disk_store.Done`: what has come of one file."""

    @property
    def key(self) -> bytes: ...
    @property
    def is_read(self) -> bool: ...
    @property
    def ok(self) -> bool: ...


class Store(Protocol):
    """`disk_store.DiskStore`, or a stand-in."""

    @property
    def is_resting(self) -> bool:
        """Whether nothing is written for a while, since a write has failed."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that more should wait elsewhere."""
        ...

    @property
    def stats(self) -> DiskStats:
        """What is there, and what has happened to it."""
        ...

    def __contains__(self, key: bytes) -> bool: ...

    def admits(self, size: int, used: int) -> bool:
        """Whether an entry of so many bytes, that was used then, would be written if there is room for it."""
        ...

    def write(
        self,
        key: bytes,
        parts: Sequence[memoryview],
        ready: Callable[[], object] | None = None,
        used: int | None = None,
    ) -> bool: ...

    def use(self, uses: Iterable[tuple[bytes, int]]) -> None: ...

    def used(self, key: bytes) -> int: ...

    def read(self, key: bytes, parts: Sequence[memoryview], ready: Callable[[], object] | None = None) -> None: ...

    def give_up(self, keys: Sequence[bytes]) -> None: ...

    def done(self) -> Sequence[Done]: ...

    def remove(self, keys: Sequence[bytes]) -> None: ...

    def pin(self, keys: Sequence[bytes]) -> None: ...

    def unpin(self, keys: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


class PlaceMemory(Protocol):
    """The host memory behind places; `offload_store.HostStore`, of several ranks `RankPlaces`, or a stand-in."""

    def contents(self, places: Places) -> list[memoryview]:
        """The bytes of places, one after another."""
        ...

    def settled(self) -> Callable[[], object]:
        """What waits, in any thread, until all copies that have been issued are made."""
        ...


class _Wanted(NamedTuple):
    at: int  # page or slot
    depth: int  # of a state; 0 of a page
    since: float
    used: int  # see `last_use`


class DiskTier:
    """Entries of a `store`, which pass through the places of a `host` tier, whose bytes are in `memory`."""

    def __init__(
        self,
        store: Store,
        host: HostTier,
        memory: PlaceMemory,
        place_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._clock = clock
        self._host = host
        self._memory = memory
        self._place_bytes = place_bytes
        self._most_copied = max(1, _STEP_BYTES // place_bytes)
        self._most_writing = max(_FEWEST_WRITTEN, int(host.index.num_places * _WRITING_SHARE))
        self._wanted: OrderedDict[bytes, _Wanted] = OrderedDict()
        self._writing: dict[bytes, Places] = {}
        self._unwanted: set[bytes] = set()  # of those being written: nobody may have them
        self.reads = DiskReads(store, host, memory, clock)
        self._given_up = 0  # entries that were evicted before they could be written, or found no room on disk

    @property
    def has_work(self) -> bool:
        """Whether a step has something to copy, or to look after."""
        return bool(self._wanted or self._writing) or self.reads.has_work

    @property
    def num_unwritten(self) -> int:
        """Entries that would be lost if the process ended now."""
        return len(self._wanted) + len(self._writing)

    @property
    def stats(self) -> DiskStats:
        """What is on disk, and what has happened to it."""
        stats = self.store.stats
        refused = stats.refused + self._given_up
        return msgspec.structs.replace(stats, unwritten=self.num_unwritten, refused=refused)

    def __contains__(self, name: bytes) -> bool:
        """Whether an entry can be read, or is being read."""
        return name in self.reads or (name in self.store and name not in self._writing)

    def want(self, name: bytes, at: int, depth: int = 0, used: int = 0) -> None:
        """Have an entry written that is at a page or, with its `depth`, at a slot, and was `used` then, see
        `last_use`."""
        if name not in self.store and name not in self._writing:
            self._wanted[name] = _Wanted(at, depth, self._clock(), used)

    def remove(self, names: Iterable[bytes]) -> None:
        """See that nobody gets what is kept under these keys."""
        for name in names:
            self._wanted.pop(name, None)
            if name in self._writing:
                self._unwanted.add(name)
            elif name in self.reads:
                self.reads.remove(name)
            else:
                self.store.remove([name])

    def use_names(self, names: Iterable[tuple[bytes, int]]) -> None:
        """As `pinned_prompts.Tier.use_names`."""
        self.store.use(names)

    def pin_names(self, names: Sequence[bytes]) -> None:
        """As `pinned_prompts.Tier.pin_names`."""
        self.store.pin(names)

    def unpin_names(self, names: Sequence[bytes]) -> None:
        """As `pinned_prompts.Tier.unpin_names`."""
        self.store.unpin(names)

    def copy_ahead(self, is_there: Callable[[bytes, int, int], bool | None], *, is_last: bool = False) -> None:
        """Have what will be written copied to host memory beside this step, of what `is_there` (key, page or slot, and
        depth) on the device; None is for what a step in flight still fills. The others have been given up, unless host
        memory has them. `is_last`: the server ends."""
        copied, now = 0, self._clock()
        most = min(self._most_copied, self._most_writing - sum(map(len, self._writing.values())))
        for name, wanted in list(islice(self._wanted.items(), _MOST_LOOKED_AT)):
            if wanted.depth and now - wanted.since < _STATE_SECONDS and not is_last:
                continue
            if name in self._host:
                continue
            there = is_there(name, wanted.at, wanted.depth)
            places = self._host.index.state_places if wanted.depth else 1
            if there is False or not self.store.admits(places * self._place_bytes, wanted.used):
                del self._wanted[name]
                self._given_up += 1
            elif there and copied < most and not self.store.is_behind:
                self._host.pass_through(name, wanted.at, wanted.depth, wanted.used)
                copied += places

    def launched(self) -> None:
        """The copies of this step are on their way: write what they bring."""
        if self.store.is_resting:
            self._wanted.clear()
        settled: Callable[[], object] | None = None
        for name, wanted in list(islice(self._wanted.items(), _MOST_LOOKED_AT)):
            if self.store.is_behind:
                return
            if name not in self._host or self._host.is_restoring(name):
                continue
            settled = self._memory.settled() if settled is None else settled
            places = self._host.index.hold(name)
            if self.store.write(name, self._memory.contents(places), settled, wanted.used):
                self._writing[name] = places
            else:
                self._host.index.release(places)
            del self._wanted[name]

    def poll(self) -> None:
        """Take in what has been written and read."""
        for done in self.store.done():
            if done.is_read:
                self.reads.settle(done)
                continue
            self._host.index.release(self._writing.pop(done.key))
            if done.key in self._unwanted:
                self._unwanted.remove(done.key)
                if done.ok:
                    self.store.remove([done.key])

    @property
    def num_places(self) -> int:
        """Places of host memory that entries pass through."""
        return self._host.index.num_places

    def check(self) -> None:
        """Assert that places are held for what is written, read and waited for, and for nothing else."""
        assert self._unwanted <= set(self._writing)
        self.reads.check()
        self._host.index.check_held([*self._writing.values(), *self.reads.held])
