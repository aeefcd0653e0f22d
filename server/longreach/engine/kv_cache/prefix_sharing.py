"""Cached pages for requests that run: how far a request gets with what others have computed or are computing.

A request that is let in begins with cached pages, see `allocator.PageAllocator.reserve`. Here it takes over more of
them later, in place of reserved ones, and it is told what others compute for it. `prefix_finder` says what there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from longreach.engine.kv_cache.borders import longest_chain
from longreach.engine.kv_cache.disk_reads import DiskReads
from longreach.engine.kv_cache.group_pages import GroupPages
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_finder import Away, PrefixFinder
from longreach.engine.kv_cache.prompt_uses import PromptUses
from longreach.engine.kv_cache.restored_ahead import RestoredAhead
from longreach.engine.kv_cache.state_allocator import StateAllocator
from longreach.engine.requests.page_hold import DROPPED
from longreach.engine.requests.request import Request
from longreach.sizes import TILE

# A request that runs computes what is read for it if waiting takes longer than so many seconds, and than such a share
# of the time of computing it all: less leaves the device to others.
_LEAST_WAIT = 0.05
_WORTH_COMPUTING = 0.25


class PrefixMatch(NamedTuple):
    """Where a request stands, `computed` tokens, and whether it `waits` for what the host has before it computes."""

    computed: int
    waits: bool


class PrefixSharing:
    """Cached pages of a `pool`, and copies of `states`, for requests that hold pages already or wait."""

    def __init__(
        self,
        pool: PagePool,
        groups: PageGroups,
        states: StateAllocator | None,
        held: GroupPages,
        finder: PrefixFinder,
        uses: PromptUses,
    ) -> None:
        self._pool = pool
        self._size = pool.page_size
        self._groups = groups
        self._states = states
        self._held = held
        self._finder = finder
        self._uses = uses
        self.ahead = RestoredAhead(pool, groups, finder)

    def match_prefix(self, request: Request, max_restored: int) -> PrefixMatch:
        """Share cached pages in place of reserved ones, from where the request stands, as far as there are any.

        Pages and states that the host has are restored, at most as much as `max_restored` pages of all requests before
        the next `take_moves`. Where the next border needs more, its pages come in several steps. A state is not cut: if
        it takes more, it is restored when nothing else is.
        """
        start = len(request.hold.pages)
        request.hold.not_launched &= request.computed < start * self._size
        if request.computed % self._size or request.hold.not_launched:
            return PrefixMatch(request.computed, False)
        assert request.computed in (0, start * self._size), request.id  # 0: it has just been let in
        if self._finder.by_border:
            found = self._match_borders(request, max_restored)
            while request.hold.ahead and not found.waits:  # these are for a border further on
                found = self._match_borders(request, max_restored)
            return found
        hold, pool = request.hold, self._pool
        waits = False
        for digest in hold.digests[start : self._finder.most_shared(request)]:
            if pool.is_restoring(digest):
                waits = True  # for another request's page
                break
            if (page := pool.cache.lookup(digest)) is not None:
                pool.share(page)
            elif pool.host is not None and digest in pool.host:
                waits = True
                if pool.num_restoring >= max_restored:
                    break
                [page] = pool.restore([digest])
                self._note_restored(request, [digest])
            else:
                break
            hold.pages.append(page)
            hold.reserves[0] -= 1
            self.note_cached(request, 1)
        return PrefixMatch(len(hold.pages) * self._size, waits)

    def lookup(self, request: Request) -> int:
        """The position up to which a request's tokens are computed or cached; looks further than last time only."""
        if request.computed % self._size:
            return request.computed
        hold, start = request.hold, request.computed // self._size
        known = max(start, hold.chain_until)
        chain = longest_chain(
            self._groups, hold.digests, known, self._finder.most_shared(request), self._finder.has(request)
        )
        if not self._finder.by_border:
            hold.cached_until = chain * self._size
        elif chain > known or hold.cached_until < request.computed or self._states is not None:
            hold.cached_until = self._finder.usable(request, start, chain) * self._size
        hold.chain_until = chain
        return max(hold.cached_until, request.computed)

    def awaits(self, request: Request, start: int, ahead: Request, end: int) -> bool:
        """Whether a request, which could compute from `start` on, waits for one that is computed up to `end`.

        It does where that one goes on to leave a copy of its state from which the request can start further on.
        """
        if ahead is request or end < start:
            return False
        digests, last = request.hold.digests, self._finder.most_shared(request)
        depths = (border // self._size for border in ahead.states.borders if border > start and border >= end)
        return any(depth <= last and ahead.hold.digests[depth - 1] == digests[depth - 1] for depth in depths)

    def awaits_disk(self, request: Request, seconds: Callable[[Request, int, int], float]) -> bool:
        """Whether a request that could compute waits for what is read from disk for it, which begins here.

        `seconds` is how long computing its tokens from one position to another would take: it waits no longer, and
        computes up to where `meets` says if that is quicker.
        """
        disk = self._pool.disk
        if disk is None or request.computed % self._size:
            return False
        start, reads = request.computed // self._size, disk.reads
        self._uses.begin(request)
        if (room := reads.begin_turn(request.id, start)) is not None:
            border, names = self._finder.on_disk(request, disk, room, start)
            most = seconds(request, request.computed, border * self._size)
            pages: list[int] = []
            if not self._finder.by_border:
                at = {digest: page for page, digest in enumerate(request.hold.digests[start:border], start)}
                pages = [at[name] for name, _ in names]
            reads.ask(request.id, start, names, most, runs=request.seq_slot >= 0, pages=pages)
        return reads.awaits(request.id) and not self._computes_meanwhile(request, reads, seconds)

    def _computes_meanwhile(
        self, request: Request, reads: DiskReads, seconds: Callable[[Request, int, int], float]
    ) -> bool:
        """Whether a request computes pages, from the first one on, while the last ones are read."""
        page = request.computed // self._size
        if (rest := reads.rest(request.id, page)) is None:
            return False
        computing = seconds(request, request.computed, (page + rest.pages) * self._size)
        if rest.seconds < max(_LEAST_WAIT, _WORTH_COMPUTING * computing):
            reads.meet(request.id, None)
            return False
        # Both take as long if each has its share. Policies choose keys for whole tiles, which a chunk does not cut.
        unit = 1 if request.spec.attention.is_dense else max(1, TILE // self._size)
        share = math.ceil(rest.pages * rest.seconds / (rest.seconds + computing))
        reads.meet(request.id, min(page + rest.pages, -(-(page + share) // unit) * unit))
        return True

    def meets(self, request: Request, end: int) -> int:
        """The position, at most `end`, up to which a request computes before it takes over what is read for it."""
        disk = self._pool.disk
        page = None if disk is None else disk.reads.meets(request.id)
        return end if page is None else min(end, page * self._size)

    def refused(self, request: Request) -> None:
        """A request that waits for nothing that is read could not be let in."""
        if (disk := self._pool.disk) is not None:
            disk.reads.refused(request.id)

    def goes_on(self, request: Request) -> None:
        """A request computes: it needs no more of what was read for it."""
        if (disk := self._pool.disk) is not None:
            disk.reads.goes_on(request.id)

    def digests(self, request: Request, start: int, end: int) -> list[bytes]:
        """Those of the pages that hold tokens `start` to `end`, of those that have any."""
        return request.hold.digests[start // self._size : self._pool.pages_for(end)]

    def first_of(self, digests: set[bytes], request: Request, start: int, end: int) -> int:
        """The first position from `start` to `end` at which a page with one of these digests begins; `end` if none."""
        last = min(self._pool.pages_for(end), self._finder.most_shared(request))
        for page in range(self._pool.pages_for(start), last):
            if request.hold.digests[page] in digests:
                return page * self._size
        return end

    def note_cached(self, request: Request, pages: int) -> None:
        """Note that so many more pages of a request's prompt were in the prefix cache; what it gets back after a
        preemption is not counted."""
        if not request.preempted:
            request.hold.cached_tokens += pages * self._size

    def _note_restored(self, request: Request, names: Iterable[bytes], pages: int = 1) -> None:
        """Note that so many pages of a request's prompt, of entries with these keys, were not on the device; see
        `note_cached`."""
        names = list(names)
        self._took(request, names)
        if request.preempted:
            return
        disk = self._pool.disk
        if disk is not None and any(disk.reads.was_read(request.id, name) for name in names):
            request.hold.disk_tokens += pages * self._size
        else:
            request.hold.host_tokens += pages * self._size

    def _took(self, request: Request, names: Iterable[bytes]) -> None:
        """Entries are on their way to the device: others may have the places that were held for a request."""
        if (disk := self._pool.disk) is not None:
            disk.reads.took(request.id, names)

    def _note_away(self, request: Request, places: Sequence[int], away: Away, pages: int) -> None:
        """As `_note_restored` of what was away on the way to a border, so many `pages` on: `places` are the pages of
        tokens that `away.pages` belong to. A state that comes back alone stands for all of them."""
        names: dict[int, list[bytes]] = {}
        for place, name in zip(places, away.pages, strict=True):
            names.setdefault(place, []).append(name)
        for of_page in names.values():
            self._note_restored(request, of_page)
        if away.state and not names:
            self._note_restored(request, away.state, pages)

    def _start_from(self, request: Request, border: int) -> bool:
        """Have a request go on from the copy of its state at a border, if its model keeps any and a slot is left."""
        if self._states is None:
            return True
        copy = self._finder.copy_at(request, border)
        return copy is not None and self._states.start_from(request, copy)

    def _match_borders(self, request: Request, max_restored: int) -> PrefixMatch:
        """As `match_prefix`, from border to border: windows have pages for some only, and states copies at some."""
        hold, pool, groups = request.hold, self._pool, self._groups
        start = len(hold.pages)
        here = PrefixMatch(start * self._size, False)
        chain = longest_chain(groups, hold.digests, start, self._finder.most_shared(request), self._finder.has(request))
        border = self._finder.usable(request, start, chain)
        away = self._finder.away(request, start, border)
        if any(pool.is_restoring(name) for name in (*away.keys, *hold.ahead)):
            return here._replace(waits=True)
        if self.ahead.come_for_others(request, away.pages):
            return here._replace(waits=True)
        if self._finder.places(away) > max(0, max_restored - pool.num_restoring):
            if pool.num_restoring:
                return here._replace(waits=True)
            reach = self._finder.reach(request, start, chain, max_restored)
            nearer = self._finder.usable(request, start, reach)
            border = nearer if nearer > start else border
            away = self._finder.away(request, start, border)
            pool.pin_away(away.keys)  # those that come later, too, which are not to make room for what goes
            if self._finder.places(away) > max_restored and (
                brought := self.ahead.bring(request, start, border, max_restored)
            ):
                self._took(request, brought)
                return here._replace(waits=True)
        pool.pin_away(away.keys)
        if border == start or not self._start_from(request, border):
            self.ahead.put_back(request)
            return here
        self._held.drop_behind(request, border)
        places: list[tuple[list[int], int]] = []  # of what is restored, in the order of `away`
        came: list[tuple[int, bytes]] = []  # places and keys of what was restored ahead
        for group, table in enumerate(hold.tables):
            first = max(start, groups.first(group, border))
            table += [DROPPED] * (first - start)
            for digest in self._finder.keys(hold, (group,), first, border):
                if (page := pool.cache.lookup(digest)) is not None:
                    pool.share(page, backed=group in groups.windowed)
                elif (page := self.ahead.take(request, digest)) is not None:
                    came.append((len(table), digest))
                    hold.reserves[group] += 1  # it has been taken from these
                else:
                    places.append((table, len(table)))
                    page = DROPPED
                table.append(page)
                hold.reserves[group] -= 1
        # Last, since it may take the place of idle pages.
        for (table, place), page in zip(places, pool.restore(away.pages) if places else (), strict=True):
            table[place] = page
        brought = away._replace(pages=[name for _, name in came] + away.pages)
        self._note_away(request, [place for place, _ in came] + [place for _, place in places], brought, border - start)
        self.ahead.put_back(request, known_only=True)
        hold.settled = border
        self._held.trim(hold)
        self.note_cached(request, border - start)
        return PrefixMatch(border * self._size, bool(away.keys))
