"""What a request can share of what is cached: up to which border, which pages, and the copy of a state there.

It asks the pool, the groups and the states, and changes nothing; `allocator` acts on what it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from longreach.engine.kv_cache.borders import STATE_GROUP, key, longest_chain, usable_border
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.state_allocator import StateAllocator
from longreach.engine.kv_cache.state_pool import AWAY, FoundCopy
from longreach.engine.requests.page_hold import PageHold
from longreach.engine.requests.request import Request


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

    def match(self, request: Request) -> Match:
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

    def usable(self, request: Request, start: int, end: int, *, on_device: bool = False) -> int:
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

    def has(self, request: Request) -> Callable[[bytes], bool]:
        """Whether a page with a key is there for a request: on the device, in host memory, or ahead of it."""
        ahead, has = request.hold.ahead, self._pool.has
        return (lambda name: name in ahead or has(name)) if ahead else has

    def on_disk(self, request: Request, disk: DiskTier, room: int) -> list[tuple[bytes, int]]:
        """Key and depth (0 of a page) of what a request that holds nothing gets from disk, in the order in which it
        needs them, as far as it fits into `room` places of host memory. What takes it no further is left there."""
        hold, most = request.hold, self.most_shared(request)
        base = self.usable(request, 0, longest_chain(self._groups, hold.digests, 0, most, self._pool.has))
        while most > base:
            border = self._usable_from_disk(request, most, disk)
            if border <= base:
                return []
            names = [
                (digest, 0)
                for group in self._all
                for digest in self.keys(hold, (group,), self._groups.first(group, border), border)
                if not self._pool.has(digest)
            ]
            if self._states is not None and not self._states.has(hold.digests[border - 1]):
                names.append((key(hold.digests[border - 1], STATE_GROUP), border))
            excess = sum(self._state_places if depth else 1 for _, depth in names) - room
            if excess <= 0:
                return names
            most = border - max(1, excess // max(1, len(self._all)))
        return []

    def _usable_from_disk(self, request: Request, most: int, disk: DiskTier) -> int:
        """The longest border of at most `most` pages that the device, the host and the disk together have."""
        digests, groups = request.hold.digests, self._groups

        def has(name: bytes) -> bool:
            return self._pool.has(name) or name in disk

        border = usable_border(groups, digests, 0, longest_chain(groups, digests, 0, most, has), has)
        while (states := self._states) is not None and border:
            depths = range(border, 0, -1)
            found = (d for d in depths if states.has(digests[d - 1]) or key(digests[d - 1], STATE_GROUP) in disk)
            depth = next(found, 0)
            border = usable_border(groups, digests, 0, depth, has)
            if border == depth:
                break
        return border

    def copy_at(self, request: Request, border: int) -> FoundCopy | None:
        """The copy of a request's state at a usable border; None at its beginning, or without states."""
        return None if self._states is None or not border else self._states.longest(request, border - 1, border)

    def away(self, request: Request, start: int, border: int) -> Away:
        """What a request needs to go from one border to another and is not on the device."""
        hold = request.hold
        firsts = ((group, max(start, self._groups.first(group, border))) for group in self._all)
        keys = (digest for group, first in firsts for digest in self.keys(hold, (group,), first, border))
        pages = [digest for digest in keys if not (digest in hold.ahead or self._pool.cache.has_digest(digest))]
        copy = self.copy_at(request, border) if border > start else None
        state = [key(hold.digests[border - 1], STATE_GROUP)] if copy is not None and copy.slot == AWAY else []
        return Away(pages, state)

    def places(self, away: Away) -> int:
        """How many pages could be restored in place of what is away."""
        return len(away.pages) + (self._state_places if away.state else 0)

    def reach(self, hold: PageHold, start: int, chain: int, count: int) -> int:
        """The page up to which full groups have so few pages that are not on the device that they and a state can be
        restored in place of `count` pages."""
        count = max(1, count - self._state_places)
        for page in range(start, chain):
            away = self.keys(hold, self._groups.full, page, page + 1)
            count -= sum(not (digest in hold.ahead or self._pool.cache.has_digest(digest)) for digest in away)
            if count < 0:
                return page
        return chain

    def keys(self, hold: PageHold, groups: tuple[int, ...], start: int, end: int) -> list[bytes]:
        """What the cache knows pages of these groups by, of those that have digests."""
        return [key(digest, group) for group in groups for digest in hold.digests[start:end]]

    def most_shared(self, request: Request) -> int:
        """How many of its first pages a request can share, given what it has to compute itself."""
        return min(len(request.hold.digests), request.skippable // self._size)
