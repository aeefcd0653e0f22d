"""What a request can share of what is cached: up to which border, which pages, and the copy of a state there.

It asks the pool, the groups and the states, and changes nothing; `allocator` acts on what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from longreach.engine.kv_cache.borders import STATE_GROUP, key, longest_chain, usable_border
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.state_allocator import StateAllocator
from longreach.engine.kv_cache.state_pool import AWAY, FoundCopy
from longreach.engine.requests.page_hold import PageHold, Sought

# Places in the lists of `CachedPrefix`.
_GPU, _HOST, _DISK = range(3)


class Match(NamedTuple):
    """What a request can share: pages up to a `border`, of each group those that it needs there, and the copy of a
    state that it can `start` from there; and how many pages full groups have, on the device or in host memory."""

    border: int
    chain: int
    pages: list[list[int]]
    start: FoundCopy | None = None


class Away(NamedTuple):
    """The keys of what a request needs at a border and only the host has: `pages`, and the copy of a `state`, or
    none."""

    pages: list[bytes]
    state: list[bytes]

    @property
    def keys(self) -> list[bytes]:
        """All of them."""
        return self.pages + self.state


class CachedPrefix(NamedTuple):
    """How many `tokens` of a prompt are cached, and in how many `pages` and `states`; each has three counts: of what is
    on the device, in host memory, and on disk. Tokens are where the farthest of their entries is."""

    tokens: list[int]
    pages: list[int]
    states: list[int]


class OnDisk(NamedTuple):
    """What a request gets from disk: up to which `border`, and key and depth (0 of a page) of each entry that it needs
    for that and is not on the device, in the order in which it needs them. None if none of these is on disk."""

    border: int
    names: list[tuple[bytes, int]]


class PrefixFinder:
    """Looks up prefixes in a `pool` of pages of `groups`, and of `states`, where a model keeps any."""

    def __init__(self, pool: PagePool, groups: PageGroups, states: StateAllocator | None) -> None:
        self._pool = pool
        self._size = pool.page_size
        self._groups = groups
        self._states = states
        self._all = tuple(range(len(groups.windows)))
        # Whether a prefix is usable up to some borders only.
        self.by_border = bool(groups.windowed) or states is not None
        self._state_places = 0 if pool.host is None else pool.host.index.state_places

    def match(self, request: Sought) -> Match:
        """What a request that holds nothing can share of what is on the device."""
        digests, most = request.hold.digests, self.most_shared(request)
        if not self.by_border:
            pages = self._pool.match(digests[:most])
            return Match(len(pages), len(pages), [pages])
        pool, groups = self._pool, self._groups
        chain = longest_chain(groups, digests, 0, most, pool.has)
        on_device = longest_chain(groups, digests, 0, chain, pool.cache.has_digest)
        border = self.usable(request, 0, on_device, on_device=True)
        keys = [self.keys(request.hold, (group,), groups.first(group, border), border) for group in self._all]
        return Match(border, chain, [pool.match(of_group) for of_group in keys], self.copy_at(request, border))

    def usable(self, request: Sought, start: int, end: int, *, on_device: bool = False) -> int:
        """As `usable_border`, for a request, with states counted in: of what the device or the host has, or of what is
        `on_device`."""
        has = self._pool.cache.has_digest if on_device else self.has(request)
        border = usable_border(self._groups, request.hold.digests, start, end, has)
        while self._states is not None and border > start:
            found = self._states.longest(request, start, border, on_device=on_device)
            if found is None:
                return start
            border = usable_border(self._groups, request.hold.digests, start, found.depth, has)
            if border == found.depth:
                break
        return border

    def has(self, request: Sought) -> Callable[[bytes], bool]:
        """Whether a page with a key is there for a request: on the device, in host memory, or ahead of it."""
        ahead, has = request.hold.ahead, self._pool.has
        return (lambda name: name in ahead or has(name)) if ahead else has

    def has_on_device(self, request: Sought) -> Callable[[bytes], bool]:
        """Whether a page with a key is there for a request, on the device or ahead of it."""
        ahead, has = request.hold.ahead, self._pool.cache.has_digest
        return (lambda name: name in ahead or has(name)) if ahead else has

    def on_disk(self, request: Sought, disk: Container[bytes], room: int, start: int = 0) -> OnDisk:
        """What a request that stands at a border gets from disk: up to which border, and what it needs for that and is
        not on the device, as far as it fits into `room` places of host memory. What takes it no further is left there.
        """
        hold, on_device = request.hold, self.has_on_device(request)
        base = self.usable(
            request,
            start,
            longest_chain(self._groups, hold.digests, start, self.most_shared(request), self.has(request)),
        )
        most = self._reach_from_disk(request, disk, room, start)
        while most > base:
            border = self._usable_from_disk(request, start, most, disk)
            if border <= base:
                break
            names = [
                (name, 0)
                for group in self._all
                for name in self.keys(hold, (group,), max(start, self._groups.first(group, border)), border)
                if not on_device(name)
            ]
            digest = hold.digests[border - 1]
            if self._states is not None and not self._states.is_on_device(digest):
                names.append((key(digest, STATE_GROUP), border))
            excess = sum(self._state_places if depth else 1 for _, depth in names) - room
            if excess <= 0:
                return OnDisk(border, names)
            most = border - max(1, excess // max(1, len(self._all)))
        return OnDisk(base, [])

    def _reach_from_disk(self, request: Sought, disk: Container[bytes], room: int, start: int) -> int:
        """The page up to which full groups have all pages, of which so many are not on the device."""
        digests, most, on_device, has = (
            request.hold.digests,
            self.most_shared(request),
            self.has_on_device(request),
            self.has(request),
        )
        for page in range(start, most):
            for group in self._groups.full:
                name = key(digests[page], group)
                if on_device(name):
                    continue
                room -= 1
                if room < 0 or not (has(name) or name in disk):
                    return page
        return most

    def _usable_from_disk(self, request: Sought, start: int, most: int, disk: Container[bytes]) -> int:
        """The longest border of at most `most` pages, up to which full groups have all, that the device, the host and
        the disk together have."""
        digests, groups, has_here = request.hold.digests, self._groups, self.has(request)

        def has(name: bytes) -> bool:
            return has_here(name) or name in disk

        border = usable_border(groups, digests, start, most, has)
        while (states := self._states) is not None and border > start:
            depths = range(border, start, -1)
            found = (d for d in depths if states.has(digests[d - 1]) or key(digests[d - 1], STATE_GROUP) in disk)
            depth = next(found, start)
            border = usable_border(groups, digests, start, depth, has)
            if border == depth:
                break
        return border

    def cached(self, request: Sought, disk: DiskTier | None) -> CachedPrefix:
        """What a request that holds nothing would get now, and from where."""
        border = self._farthest(request, disk)
        digests, firsts = request.hold.digests, [self._groups.first(group, border) for group in self._all]
        tokens, pages, states = [0, 0, 0], [0, 0, 0], [0, 0, 0]
        for page in range(border):
            tier = _GPU
            for group, first in enumerate(firsts):
                if page >= first:
                    of_entry = self._tier(key(digests[page], group))
                    pages[of_entry] += 1
                    tier = max(tier, of_entry)
            tokens[tier] += self._size
        if self._states is not None and border:
            copy = self.copy_at(request, border)
            tier = _DISK if copy is None else _HOST if copy.slot == AWAY else _GPU
            states[tier] = 1
            if tier > _GPU and not any(pages[_HOST:]):  # it stands for all tokens that nothing else on the device does
                tokens[_GPU] = self.match(request).border * self._size
                tokens[tier] = border * self._size - tokens[_GPU]
        return CachedPrefix(tokens, pages, states)

    def _farthest(self, request: Sought, disk: DiskTier | None) -> int:
        """The border, in pages, that a request reaches which holds nothing, reading from disk in turns."""
        chain = longest_chain(self._groups, request.hold.digests, 0, self.most_shared(request), self._pool.has)
        border = self.usable(request, 0, chain)
        while disk is not None and (found := self.on_disk(request, disk, disk.num_places, border)).border > border:
            border = found.border
        return border

    def _tier(self, name: bytes) -> int:
        """Where the entry with this key comes from, which is somewhere."""
        if self._pool.cache.has_digest(name):
            return _GPU
        return _HOST if self._pool.host is not None and name in self._pool.host else _DISK

    def copy_at(self, request: Sought, border: int) -> FoundCopy | None:
        """The copy of a request's state at a usable border; None at its beginning, or without states."""
        return None if self._states is None or not border else self._states.longest(request, border - 1, border)

    def away(self, request: Sought, start: int, border: int) -> Away:
        """What a request needs to go from one border to another and is not on the device."""
        hold = request.hold
        firsts = ((group, max(start, self._groups.first(group, border))) for group in self._all)
        keys = (digest for group, first in firsts for digest in self.keys(hold, (group,), first, border))
        on_device = self.has_on_device(request)
        pages = [digest for digest in keys if not on_device(digest)]
        copy = self.copy_at(request, border) if border > start else None
        state = [key(hold.digests[border - 1], STATE_GROUP)] if copy is not None and copy.slot == AWAY else []
        return Away(pages, state)

    def places(self, away: Away) -> int:
        """How many pages could be restored in place of what is away."""
        return len(away.pages) + (self._state_places if away.state else 0)

    def reach(self, request: Sought, start: int, chain: int, count: int) -> int:
        """The page up to which full groups have so few pages that are not on the device that they and a state can be
        restored in place of `count` pages."""
        count, on_device = max(1, count - self._state_places), self.has_on_device(request)
        for page in range(start, chain):
            away = self.keys(request.hold, self._groups.full, page, page + 1)
            count -= sum(not on_device(digest) for digest in away)
            if count < 0:
                return page
        return chain

    def keys(self, hold: PageHold, groups: tuple[int, ...], start: int, end: int) -> list[bytes]:
        """What the cache knows pages of these groups by, of those that have digests."""
        return [key(digest, group) for group in groups for digest in hold.digests[start:end]]

    def most_shared(self, request: Sought) -> int:
        """How many of its first pages a request can share, given what it has to compute itself."""
        return min(len(request.hold.digests), request.skippable // self._size)
