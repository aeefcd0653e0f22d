"""Which entries of the cache have a copy in host memory. Keys and places only; `offload_store` has the memory.

An *entry* is what one group of layers has at a border: a page of keys and values, or a copy of a state. It is known by
its key, see `borders.key`. Host memory is divided into *places* of one page each. A page takes one of them, a state as
many as it needs, wherever they are: one bound holds for both, and nothing is left between them.

What the device evicts is kept here until its places are needed for another. It may also be on the device: contents
with a key never change, so that neither copy can be the wrong one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from longreach.engine.kv_cache.borders import STATE_GROUP, key
from longreach.engine.kv_cache.eviction_order import EvictionOrder
from longreach.engine.kv_cache.state_depths import StateDepths


class Copy(NamedTuple):
    """An entry on its way: its page on the device, or of a state its slot, and its `places` in host memory."""

    at: int
    places: tuple[int, ...]
    is_state: bool = False


class CacheMoves(NamedTuple):
    """What has to be done to pages and states before and beside a step, in this order; see
    `step_retry.StepRunner.move`.

    Attributes:
        evicted: entries whose page or slot is about to be written to.
        unclean: pages that have to hold numbers from now on.
        restored: entries that come back. The step does not read their pages and slots.
        saved: entries that will soon be evicted. The step does not write to their pages and slots.
    """

    evicted: list[Copy]
    unclean: list[int]
    restored: list[Copy]
    saved: list[Copy]

    @property
    def copies(self) -> int:
        """Entries that are copied."""
        return len(self.evicted) + len(self.restored) + len(self.saved)


# The part of all places in which pinned entries are evicted last.
_PINNED_SHARE = 1 / 2


class _Kept(NamedTuple):
    places: tuple[int, ...]
    depth: int  # pages before the border of a state; 0 of a page


class HostIndex:
    """`num_places` places, of which a state takes `state_places`; the entry that was used longest ago is evicted first.

    Of one prompt that is its end, see `last_use`. What the device has used since it came here goes before all others:
    it is kept twice. Pinned entries go last, as far as they fill half of the places.

    Between two calls of `unpin` a place is given one content at most, and one that is read keeps its own: the copies of
    one step can be made in any order within their kind.

    Places can be held for longer than a step, while files are written from them or read into them.
    """

    def __init__(self, num_places: int, state_places: int = 0) -> None:
        if num_places < 1:
            raise ValueError(f"num_places must be at least 1, got {num_places}")
        self.num_places = num_places
        self.state_places = state_places
        self._free = list(range(num_places - 1, -1, -1))
        self._freed: list[int] = []  # that copies of this step still use
        self._kept: dict[bytes, _Kept] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder(int(num_places * _PINNED_SHARE))
        self._lasting: set[bytes] = set()  # keys of pinned prompts, here or not
        self._pinned: set[bytes] = set()  # that this step copies
        self._in_use = 0  # places that it copies from or to
        self._copied: set[tuple[int, ...]] = set()  # these places, by entry
        self._held: Counter[tuple[int, ...]] = Counter()
        self._held_apart = 0  # places that are held, and that this step does not copy
        self._left: set[tuple[int, ...]] = set()  # held ones that are no entry's, or not yet
        self._depths = StateDepths()
        self.num_states = 0

    @property
    def num_used(self) -> int:
        """Places that hold an entry, or a part of one."""
        return self.num_places - len(self._free) - len(self._freed)

    def __contains__(self, name: bytes) -> bool:
        """Whether the entry with this key is here."""
        return name in self._kept

    def save(self, name: bytes, depth: int = 0, used: int | None = None) -> tuple[int, ...] | None:
        """The places to copy an entry to, a page or with its `depth` in pages a state, that was `used` then; None: now.

        None if it is here, or if this step uses so many places already that it finds none.
        """
        if name in self._kept:
            self._use(name, used)
            return None
        count = self.state_places if depth else 1
        assert count, "this model keeps no states"
        if not self._make_room(count):
            return None
        places = tuple(self._free.pop() for _ in range(count))
        self._keep(name, _Kept(places, depth), used)
        self._pin(name)
        return places

    def load(self, name: bytes) -> tuple[int, ...]:
        """The places to copy an entry from; it must be here."""
        self._pin(name)
        return self._kept[name].places

    def unpin(self) -> None:
        """The copies of a step are on their way: what is copied later is copied after them."""
        self._held_apart += sum(len(places) for places in self._copied if self._held[places])
        self._pinned.clear()
        self._copied.clear()
        self._in_use = 0
        self._free += self._freed
        self._freed = []

    def longest_state(self, digests: Sequence[bytes], above: int, most: int) -> int | None:
        """The depth of the state of the longest beginning of `digests`, of more than `above` pages and at most
        `most`."""
        depths = self._depths.between(above, min(most, len(digests)))
        return next((depth for depth in depths if key(digests[depth - 1], STATE_GROUP) in self._kept), None)

    def remove(self, name: bytes) -> None:
        """See that nobody gets what is kept under this key, if anything is."""
        if (kept := self._kept.pop(name, None)) is None:
            return
        self._order.remove(name)
        if kept.depth:
            self._depths.remove(kept.depth)
            self.num_states -= 1
        if self._held[kept.places]:
            self._left.add(kept.places)
        else:
            (self._freed if name in self._pinned else self._free).extend(kept.places)
        self._pinned.discard(name)

    def remove_places(self, places: Iterable[int]) -> None:
        """See that nobody gets what is kept in these places."""
        wrong = set(places)
        for name in [name for name, kept in self._kept.items() if not wrong.isdisjoint(kept.places)]:
            self.remove(name)

    def pin_names(self, names: Sequence[bytes]) -> None:
        """As `pinned_prompts.Tier.pin_names`."""
        self._lasting.update(names)
        for name in names:
            if name in self._kept:
                self._use(name, self._order.used(name))

    def use_names(self, names: Iterable[tuple[bytes, int]]) -> None:
        """As `pinned_prompts.Tier.use_names`."""
        for name, used in names:
            if name in self._kept:
                self._use(name, used)

    def spare(self, name: bytes) -> None:
        """The device has an entry, too: its places here are given to others first."""
        self._order.spare(name)

    def used(self, name: bytes) -> int:
        """When an entry that is here was used, see `last_use`."""
        return self._order.used(name)

    def unpin_names(self, names: Sequence[bytes]) -> None:
        """As `pinned_prompts.Tier.unpin_names`."""
        self._lasting.difference_update(names)
        for name in reversed(names):
            self._order.unpin(name)

    def hold(self, name: bytes) -> tuple[int, ...]:
        """The places of an entry, which keep what they contain until `release`."""
        places = self._kept[name].places
        self._hold(places)
        return places

    def release(self, places: tuple[int, ...]) -> None:
        """End one `hold` of these places."""
        self._held[places] -= 1
        if self._held[places]:
            return
        del self._held[places]
        is_copied = places in self._copied
        self._held_apart -= 0 if is_copied else len(places)
        if places in self._left:
            self._left.remove(places)
            (self._freed if is_copied else self._free).extend(places)

    def expect(self, name: bytes, depth: int = 0) -> tuple[int, ...] | None:
        """Places, held, for an entry that is not here yet and comes from elsewhere: see `arrive`. None if there is no
        room."""
        assert name not in self._kept, name
        count = self.state_places if depth else 1
        if not self._make_room(count):
            return None
        places = tuple(self._free.pop() for _ in range(count))
        self._hold(places)
        self._left.add(places)
        return places

    def arrive(self, name: bytes, places: tuple[int, ...], depth: int = 0, used: int | None = None) -> None:
        """An entry, see `save`, has come to the places that were held for it, which stay held; nothing, where it is
        here already."""
        if name not in self._kept:
            self._left.remove(places)
            self._keep(name, _Kept(places, depth), used)

    @property
    def num_unheld(self) -> int:
        """Places that could be had if no step used any."""
        return self.num_places - sum(map(len, self._held))

    def check(self) -> None:
        """Assert that every place is free, held, or holds one entry, or one part of one."""
        used = [place for kept in self._kept.values() for place in kept.places]
        used += [place for places in self._left for place in places]
        assert self._left <= set(self._held), "places that nobody holds are lost"
        every = sorted(used + self._free + self._freed)
        assert every == list(range(self.num_places)), "a place is lost or used twice"
        assert self._pinned <= set(self._kept), "an entry is in use in this step and is not here"
        assert {self._kept[name].places for name in self._pinned} <= self._copied
        assert self._in_use == sum(map(len, self._copied)), "places are in use in this step that nobody knows"
        assert self._held_apart == sum(len(places) for places in self._held if places not in self._copied)
        self._order.check()
        assert set(self._order) == self._kept.keys(), "an entry has no place in the order"
        depths = [kept.depth for kept in self._kept.values() if kept.depth]
        assert self.num_states == len(depths)
        self._depths.check(depths)
        for name, kept in self._kept.items():
            assert len(kept.places) == (self.state_places if kept.depth else 1), name

    def check_held(self, held: Sequence[tuple[int, ...]]) -> None:
        """Assert that these places, as often as they stand here, are all that is held."""
        assert Counter(held) == self._held, "places are held by nobody, or by one that does not know"

    def _hold(self, places: tuple[int, ...]) -> None:
        if not self._held[places] and places not in self._copied:
            self._held_apart += len(places)
        self._held[places] += 1

    def _keep(self, name: bytes, kept: _Kept, used: int | None) -> None:
        self._kept[name] = kept
        self._use(name, used)
        if kept.depth:
            self._depths.add(kept.depth)
            self.num_states += 1

    def _pin(self, name: bytes) -> None:
        if name not in self._pinned:
            self._pinned.add(name)
            places = self._kept[name].places
            self._in_use += len(places)
            self._copied.add(places)
            self._held_apart -= len(places) if self._held[places] else 0

    def _use(self, name: bytes, used: int | None) -> None:
        self._order.use(name, len(self._kept[name].places), used=used, pinned=name in self._lasting)

    def _make_room(self, count: int) -> bool:
        """Have so many places free, if entries that this step does not use are enough."""
        if count <= len(self._free):
            return True
        if count > self.num_places - self._in_use - self._held_apart:
            return False
        while count > len(self._free):
            name = self._order.first(self._stays)
            assert name is not None, "places are in use that nobody counts"
            self.remove(name)
        return True

    def _stays(self, name: bytes) -> bool:
        """Whether an entry's places are not to be had: this step copies them, or they are held."""
        return name in self._pinned or self._held[self._kept[name].places] > 0
