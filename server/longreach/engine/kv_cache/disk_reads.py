"""What is read from disk for requests that wait for it: in turns, each as large as host memory has room for.

A request that stands at a border asks for entries up to a border further on. Those on disk are read into places of host
memory, and with those that are there already they keep their places until the request has taken them over. Then it asks
again from where it stands. So a prefix may be longer than host memory.

It waits no longer for a turn than computing these tokens would take. It never asks again after a turn that came too
late. So all of its turns together take no longer than computing what they were for.

Where pages are enough to go on, they are read from the last one back, while the request computes from the first one on
as soon as that is quicker than to wait. Where both meet, the reads that have not begun are given up.

Where others hold the places it waits for these, within the same time. Requests that read at once have a share each. One
that runs takes places from those that could not be let in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from longreach.engine.kv_cache.host_tier import HostTier

if TYPE_CHECKING:
    from longreach.engine.kv_cache.disk_tier import Done, PlaceMemory, Places, Store

# Requests that divide host memory between them; others wait for one of these.
_MOST_AT_ONCE = 4
# Entries that have to come before their speed is believed.
_FEWEST_ARRIVED = 4


class Rest(NamedTuple):
    """What is still to be read for a request that stands at a page: so many pages, in about so many seconds."""

    pages: int
    seconds: float


class _Reading(NamedTuple):
    places: Places
    depth: int


@dataclass(eq=False)
class _Wait:
    """A request's turn: what is still to be begun, what is being read, and what it holds until it has taken it over.

    Attributes:
        start: the page where it stood when it asked; -1 if it may ask there again.
        until: when it goes on without.
        read: keys of what has come from disk for it, in all turns.
        pages: which page each of them is, in their order, where they are read from the last one back.
        begun: when reading them began.
        meets: the page up to which it computes meanwhile.
        is_late: a turn did not come in time.
        runs: it has been let in.
        is_refused: it has not been, when all that it asked for was there.
    """

    start: int = -1
    until: float = 0.0
    wanted: list[tuple[bytes, int]] = field(default_factory=list)
    names: set[bytes] = field(default_factory=set)
    read: set[bytes] = field(default_factory=set)
    held: dict[bytes, Places] = field(default_factory=dict)
    pages: dict[bytes, int] = field(default_factory=dict)
    begun: float = 0.0
    meets: int | None = None
    is_late: bool = False
    runs: bool = False
    is_refused: bool = False

    @property
    def is_reading(self) -> bool:
        """Whether something that it has asked for has not come."""
        return bool(self.wanted or self.names)

    @property
    def is_busy(self) -> bool:
        """Whether it wants or holds places."""
        return self.is_reading or bool(self.held)


class DiskReads:
    """Entries of a `store` on their way to the places of a `host` tier, whose bytes are in `memory`."""

    def __init__(self, store: Store, host: HostTier, memory: PlaceMemory, clock: Callable[[], float]) -> None:
        self._store = store
        self._host = host
        self._memory = memory
        self._clock = clock
        self._reading: dict[bytes, _Reading] = {}
        self._unwanted: set[bytes] = set()  # of those: nobody may have them
        self._waits: dict[str, _Wait] = {}

    def __contains__(self, name: bytes) -> bool:
        """Whether an entry is being read."""
        return name in self._reading

    @property
    def has_work(self) -> bool:
        """Whether anything is read, or waits for places."""
        return bool(self._reading) or any(wait.wanted for wait in self._waits.values())

    def begin_turn(self, request_id: str, start: int) -> int | None:
        """End a request's turn, and how many places another may take that begins at a page; None if it may not ask,
        since it has done so there, or was too late before."""
        wait = self._waits.setdefault(request_id, _Wait())
        self._pass(wait, start)
        if start <= wait.start or self.awaits(request_id):
            return None
        wait.is_late |= wait.is_reading
        if wait.is_late:
            return None
        self._release(wait)
        index = self._host.index
        others = sum(other.is_busy for other in self._waits.values())
        share = index.num_places // min(_MOST_AT_ONCE, 1 + others)
        return min(share, index.num_unheld) if 2 * index.num_unheld >= share else share

    def ask(
        self,
        request_id: str,
        start: int,
        names: Sequence[tuple[bytes, int]],
        seconds: float,
        *,
        runs: bool,
        pages: Sequence[int] = (),
    ) -> None:
        """Have entries read, by key and depth, or held where they are in host memory, for a request at a page that has
        begun a turn and waits so long; none if there is nothing for it on disk. It `runs`, or has not been let in.

        With `pages`, which say where each of them is, the last one is read first: see `rest`.
        """
        wait = self._waits[request_id]
        wait.start, wait.until = start, self._clock() + seconds
        wait.pages = dict(zip((name for name, _ in names), pages, strict=True)) if pages else {}
        wait.wanted, wait.runs, wait.is_refused = list(names), runs, False
        self._begin(wait)

    def awaits(self, request_id: str) -> bool:
        """Whether a request waits for its turn's end."""
        wait = self._waits.get(request_id)
        if wait is None or not wait.is_reading:
            return False
        if self._clock() >= wait.until:
            wait.meets = None
            return False
        self._begin(wait)
        return wait.is_reading

    def rest(self, request_id: str, page: int) -> Rest | None:
        """What is still to be read from the last page back for a request that stands at a page; None if nothing is, or
        if nobody can tell yet how long that takes."""
        wait = self._waits.get(request_id)
        if wait is None or not wait.pages or wait.wanted:
            return None
        missing = [at for name, at in wait.pages.items() if name in wait.names]
        arrived = len(wait.pages) - len(missing)
        seconds = self._clock() - wait.begun
        if not missing or arrived < _FEWEST_ARRIVED or seconds <= 0:
            return None
        return Rest(missing[-1] + 1 - page, len(missing) * seconds / arrived)

    def meet(self, request_id: str, page: int | None) -> None:
        """A request computes up to a page, while those behind it are read; None: it waits."""
        self._waits[request_id].meets = page

    def meets(self, request_id: str) -> int | None:
        """The page up to which a request computes, if those behind it are being read for it."""
        wait = self._waits.get(request_id)
        return None if wait is None else wait.meets

    def was_read(self, request_id: str, name: bytes) -> bool:
        """Whether an entry has come from disk for a request."""
        wait = self._waits.get(request_id)
        return wait is not None and name in wait.read

    def took(self, request_id: str, names: Iterable[bytes]) -> None:
        """Entries are on their way to the device for a request, which needs them here no longer."""
        if (wait := self._waits.get(request_id)) is not None:
            for name in names:
                if (places := wait.held.pop(name, None)) is not None:
                    self._host.index.release(places)

    def goes_on(self, request_id: str) -> None:
        """A request computes: what has come for it, or comes too late, is held no more, unless they are to meet."""
        if (wait := self._waits.get(request_id)) is not None and wait.meets is None:
            wait.is_late |= wait.is_reading
            self._release(wait)

    def refused(self, request_id: str) -> None:
        """There is no room for a request that would run: others may have the places that it holds."""
        if (wait := self._waits.get(request_id)) is not None:
            wait.is_refused = True

    def forget(self, request_id: str) -> None:
        """A request has gone, or begins anew."""
        if (wait := self._waits.pop(request_id, None)) is not None:
            self._release(wait)

    def remove(self, name: bytes) -> None:
        """See that nobody gets an entry that is being read."""
        self._unwanted.add(name)

    def settle(self, done: Done) -> None:
        """Take in what has been read, or could not be."""
        index = self._host.index
        places, depth = self._reading.pop(done.key)
        unwanted = done.key in self._unwanted
        self._unwanted.discard(done.key)
        arrived = done.ok and not unwanted
        if unwanted:
            self._store.remove([done.key])
        if arrived:
            index.arrive(done.key, places, depth, self._store.used(done.key))
        for wait in self._waits.values():
            if done.key in wait.names:
                wait.names.remove(done.key)
                if arrived:
                    wait.held[done.key] = index.hold(done.key)
                    wait.read.add(done.key)
        index.release(places)

    @property
    def held(self) -> list[Places]:
        """The places that are read into, and those that are held for requests, as often as they are."""
        held = [reading.places for reading in self._reading.values()]
        return held + [places for wait in self._waits.values() for places in wait.held.values()]

    def check(self) -> None:
        """Assert that what nobody may have is being read."""
        assert self._unwanted <= set(self._reading)

    def _begin(self, wait: _Wait) -> None:
        """Begin a turn, if there is room for it."""
        if not wait.wanted:
            return
        host, index = self._host, self._host.index
        # While it waited for room files may have made room for others.
        wait.wanted = [(n, d) for n, d in wait.wanted if n in host or n in self._reading or n in self._store]
        missing = [(name, depth) for name, depth in wait.wanted if name not in host and name not in self._reading]
        room = sum(index.state_places if depth else 1 for _, depth in missing)
        if wait.runs:
            self._take_from_refused(room)
        if room > index.num_unheld:
            return
        wanted, wait.wanted = wait.wanted, []
        if wait.pages:
            wanted.reverse()
        wait.begun = self._clock()
        # First, since room is made for the others.
        wait.held |= {name: index.hold(name) for name, _ in wanted if name in host and name not in wait.held}
        ready = self._memory.settled()
        for name, depth in wanted:
            if name in host:
                continue
            if name not in self._reading:
                places = index.expect(name, depth)
                if places is None:
                    break  # this step uses what is left
                self._reading[name] = _Reading(places, depth)
                self._store.read(name, self._memory.contents(places), ready)
            wait.names.add(name)

    def _take_from_refused(self, room: int) -> None:
        """Have so many places, as far as requests hold them that could not be let in."""
        for wait in self._waits.values():
            if room <= self._host.index.num_unheld:
                return
            if wait.held and wait.is_refused and not wait.is_reading:
                self._release(wait)
                wait.start = -1

    def _pass(self, wait: _Wait, page: int) -> None:
        """What a request has computed is read for it no more; where nothing else is, they have met."""
        passed = {name for name in wait.names if wait.pages.get(name, page) < page}
        if passed:
            wait.names -= passed
            self._give_up(passed)
        if not wait.is_reading:
            wait.meets = None

    def _give_up(self, names: set[bytes]) -> None:
        """Do not read what nobody wants any more, as far as that has not begun."""
        wanted = {name for wait in self._waits.values() for name in wait.names}
        self._store.give_up([name for name in names if name not in wanted])

    def _release(self, wait: _Wait) -> None:
        names, wait.names = wait.names, set()
        wait.wanted, wait.meets = [], None
        if names:
            self._give_up(names)
        for places in wait.held.values():
            self._host.index.release(places)
        wait.held = {}
