"""What is kept on disk, below host memory: which entries are written, and which are read before a request needs them.

Entries pass through host memory. What the prefix cache takes up is copied there beside the steps to come, and written
from there. A request that waits has its prefix read into host memory, as far as that is on disk, and takes it up from
there as it takes up all that is in host memory. While files are written or read, their places are held.

A request waits for its prefix no longer than computing it would take. Others are not held up.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec

from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.stats import DiskStats

# Entries that are looked at in one step, and bytes that are copied to be written beside it.
_MOST_LOOKED_AT = 512
_STEP_BYTES = 256 << 20
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

    def write(self, key: bytes, parts: Sequence[memoryview], ready: Callable[[], object] | None = None) -> bool: ...

    def read(self, key: bytes, parts: Sequence[memoryview], ready: Callable[[], object] | None = None) -> None: ...

    def done(self) -> Sequence[Done]: ...

    def remove(self, keys: Sequence[bytes]) -> None: ...

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


class _Reading(NamedTuple):
    places: Places
    depth: int


class _Wait:
    """What is read for one request, and what it holds of that until it goes on."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.names: set[bytes] = set()
        self.read: set[bytes] = set()  # those that have come
        self.held: list[Places] = []


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
        self._most_copied = max(1, _STEP_BYTES // place_bytes)
        self._wanted: OrderedDict[bytes, _Wanted] = OrderedDict()
        self._writing: dict[bytes, Places] = {}
        self._reading: dict[bytes, _Reading] = {}
        self._unwanted: set[bytes] = set()  # of those being written or read: nobody may have them
        self._waits: dict[str, _Wait] = {}
        self._given_up = 0  # entries that were evicted before they could be written

    @property
    def has_work(self) -> bool:
        """Whether a step has something to copy, or to look after."""
        return bool(self._wanted or self._reading or self._writing)

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
        return name in self._reading or (name in self.store and name not in self._writing)

    def want(self, name: bytes, at: int, depth: int = 0) -> None:
        """Have an entry written that is at a page or, with its `depth`, at a slot."""
        if name not in self.store and name not in self._writing:
            self._wanted[name] = _Wanted(at, depth, self._clock())

    def remove(self, names: Iterable[bytes]) -> None:
        """See that nobody gets what is kept under these keys."""
        for name in names:
            self._wanted.pop(name, None)
            if name in self._writing or name in self._reading:
                self._unwanted.add(name)
            else:
                self.store.remove([name])

    def copy_ahead(self, is_there: Callable[[bytes, int, int], bool | None], *, is_last: bool = False) -> None:
        """Have what will be written copied to host memory beside this step, of what `is_there` (key, page or slot, and
        depth) on the device; None is for what a step in flight still fills. The others have been given up, unless host
        memory has them. `is_last`: the server ends."""
        copied, now = 0, self._clock()
        for name, wanted in list(islice(self._wanted.items(), _MOST_LOOKED_AT)):
            if wanted.depth and now - wanted.since < _STATE_SECONDS and not is_last:
                continue
            if name in self._host:
                continue
            there = is_there(name, wanted.at, wanted.depth)
            if there is False:
                del self._wanted[name]
                self._given_up += 1
            elif there and copied < self._most_copied:
                self._host.save_ahead(name, wanted.at, wanted.depth)
                copied += max(1, self._host.index.state_places if wanted.depth else 1)

    def launched(self) -> None:
        """The copies of this step are on their way: write what they bring."""
        if self.store.is_resting:
            self._wanted.clear()
        settled: Callable[[], object] | None = None
        for name in list(islice(self._wanted, _MOST_LOOKED_AT)):
            if self.store.is_behind:
                return
            if name not in self._host or self._host.is_restoring(name):
                continue
            settled = self._memory.settled() if settled is None else settled
            places = self._host.index.hold(name)
            if self.store.write(name, self._memory.contents(places), settled):
                self._writing[name] = places
            else:
                self._host.index.release(places)
            del self._wanted[name]

    def poll(self) -> None:
        """Take in what has been written and read."""
        index = self._host.index
        for done in self.store.done():
            unwanted = done.key in self._unwanted
            self._unwanted.discard(done.key)
            if not done.is_read:
                index.release(self._writing.pop(done.key))
                if unwanted and done.ok:
                    self.store.remove([done.key])
                continue
            places, depth = self._reading.pop(done.key)
            arrived = done.ok and not unwanted
            if unwanted:
                self.store.remove([done.key])
            if arrived:
                index.arrive(done.key, places, depth)
            for wait in self._waits.values():
                if done.key in wait.names:
                    wait.names.remove(done.key)
                    if arrived:
                        wait.held.append(index.hold(done.key))
                        wait.read.add(done.key)
            index.release(places)

    def read_ahead(self, request_id: str, names: Sequence[tuple[bytes, int]], seconds: float) -> bool:
        """Begin to read entries, by key and depth, for a request that waits for them so long.

        False if there is no room for them all; nothing has been begun then.
        """
        index = self._host.index
        new = [(name, depth) for name, depth in names if name not in self._reading]
        if sum(index.state_places if depth else 1 for _, depth in new) > index.num_unheld:
            return False
        wait = self._waits[request_id] = _Wait(self._clock() + seconds)
        # Places whose entries were given up in this step may have copies of the last one under way.
        settled = self._memory.settled() if new else None
        for name, depth in names:
            if name not in self._reading:
                places = index.expect(name, depth)
                if places is None:
                    break  # this step uses what is left
                self._reading[name] = _Reading(places, depth)
                self.store.read(name, self._memory.contents(places), settled)
            wait.names.add(name)
        return True

    def has_asked(self, request_id: str) -> bool:
        """Whether `read_ahead` has been called for a request."""
        return request_id in self._waits

    def awaits(self, request_id: str) -> bool:
        """Whether a request waits for what is read for it."""
        wait = self._waits.get(request_id)
        return wait is not None and bool(wait.names) and self._clock() < wait.until

    def was_read(self, request_id: str, name: bytes) -> bool:
        """Whether an entry has come from disk for a request that has not gone on."""
        wait = self._waits.get(request_id)
        return wait is not None and name in wait.read

    @property
    def num_room(self) -> int:
        """Places that could be read into."""
        return self._host.index.num_unheld

    def leave(self, request_id: str) -> None:
        """A request goes on, or has gone: nothing is held for it any more."""
        if (wait := self._waits.pop(request_id, None)) is not None:
            for places in wait.held:
                self._host.index.release(places)

    def check(self) -> None:
        """Assert that places are held for what is written, read and waited for, and for nothing else."""
        assert self._unwanted <= set(self._writing) | set(self._reading)
        held = [*self._writing.values(), *(reading.places for reading in self._reading.values())]
        held += [places for wait in self._waits.values() for places in wait.held]
        self._host.index.check_held(held)
