"""The pages of requests, from the reservation to the end: the scheduler's only way to the KV cache.

    verb          | what it does
    --------------+-------------------------------------------------------------------------------------
    reserve       | promises a request pages up to a length; they are allocated without being refused then
    match_prefix  | gives a request cached pages in place of reserved ones
    allocate      | gives a request ids for reserved pages
    drop          | takes back the pages that a request's windows have left behind
    commit        | puts full pages into the prefix cache: others may share them
    invalidate    | takes pages out of the prefix cache, since their contents may be wrong
    free          | takes everything back; cached pages can still be matched until they are evicted

Layers are in groups, and each group has pages of its own: `groups` has their sizes, `borders` which of them are shared.
Pages are evicted by the pool, when it allocates and none is free. When anything of this happens is for the scheduler to
say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from longreach.engine.kv_cache.borders import is_worth_keeping, key, longest_chain
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.kv_cache.prefix_finder import PrefixFinder
from longreach.engine.kv_cache.state_allocator import StateAllocator, StateUsage
from longreach.engine.requests.page_hold import DROPPED, PageHold
from longreach.engine.requests.request import Request


class PrefixMatch(NamedTuple):
    """Where a request stands, `computed` tokens, and whether it `waits` for pages from the host before it computes."""

    computed: int
    waits: bool


class PageUsage(NamedTuple):
    """Pages on the device: all, free ones, and cached ones that no request holds; slots in host memory: all, used."""

    pages: int
    free: int
    cached: int
    host_slots: int
    used_host_slots: int


class PageAllocator:
    """Pages of a `pool` for requests; without a `hasher` pages have no digests, and there is no prefix cache.

    Without `groups` all layers are of one group that keeps all pages. `states` has the slots of a model that keeps
    recurrent states: a prefix of such a one is usable up to a border at which there is a copy of the state, too.
    """

    def __init__(
        self,
        pool: PagePool,
        hasher: PageHasher | None = None,
        groups: PageGroups | None = None,
        states: StateAllocator | None = None,
    ) -> None:
        self._pool = pool
        self._hasher = hasher
        self._size = pool.page_size
        self.groups = PageGroups(pool.page_size) if groups is None else groups
        self._all = tuple(range(len(self.groups.windows)))
        self._has_windows = bool(self.groups.windowed)
        self.states = states
        self._finder = PrefixFinder(pool, self.groups, states)

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self._pool.num_pages

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence that all pages hold."""
        return self.groups.longest(self._pool.num_pages)

    def fits(self, length: int) -> bool:
        """Whether a sequence of `length` tokens would have its pages if it were alone."""
        return self.groups.ids_for(length) <= self._pool.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can still be reserved."""
        return self._pool.num_available

    @property
    def usage(self) -> PageUsage:
        """How many pages and slots there are, and how many are in use."""
        pool, host = self._pool, self._pool.host
        slots = (0, 0) if host is None else (host.index.num_places, host.index.num_used)
        return PageUsage(pool.num_pages, pool.num_free, pool.cache.num_idle, *slots)

    @property
    def state_usage(self) -> StateUsage:
        """How many slots for states there are, and how many are in use."""
        return StateUsage(0, 0, 0) if self.states is None else self.states.usage

    def hash(self, request: Request) -> None:
        """Make the digests of a request's full pages, as far as it does not have them."""
        if self._hasher is not None:
            tokens = request.tokens[: request.known] if request.pending else request.tokens
            spec, digests = request.spec, request.hold.digests
            self._hasher.extend(digests, tokens, spec.cache_salt, spec.attention.key, request.prompt_tokens)

    def add(self, request: Request, others: Iterable[Request]) -> None:
        """Take note of a request that is new, beside `others` that are here."""
        self.hash(request)
        if self.states is not None:
            self.states.add(request)
            for other in others:
                self.states.add_parting(request, other)

    def can_reserve(self, request: Request, length: int) -> bool:
        """Whether `reserve` would do it for a request that holds nothing."""
        match = self._finder.match(request)
        if self.states is not None and not self.states.can_reserve(match.start):
            return False
        missing = self._missing(request.hold, self._pool.pages_for(length), match.border)
        return self._pool.can_reserve(sum(missing), *self._apart(match.pages))

    def reserve(self, request: Request, length: int) -> bool:
        """Reserve pages for a request's first `length` tokens, or change nothing: False.

        A request that holds nothing shares the cached pages of its prefix, and has `length` less these reserved.
        """
        hold, pages = request.hold, self._pool.pages_for(length)
        if hold.promised:
            if pages <= hold.promised:
                return True
            missing = self._missing(hold, pages, None)
            if not self._pool.reserve(sum(missing)):
                return False
        else:
            match = self._finder.match(request)
            missing = self._missing(hold, pages, match.border)
            if self.states is not None and not self.states.can_reserve(match.start):
                return False
            if not self._pool.reserve(sum(missing), *self._apart(match.pages)):
                return False
            if self.states is not None:
                self.states.reserve(request, match.start)
                self.states.add_border(request, match.chain)
            hold.clear(len(self._all))
            hold.turns, hold.settled = (match.border, match.chain), match.border
            for group, shared in enumerate(match.pages):
                hold.first[group] = match.border - len(shared)
                hold.tables[group] = [DROPPED] * hold.first[group] + shared
            if match.border:
                self._note_cached(request)
        hold.promised = pages
        for group, count in enumerate(missing):
            hold.reserves[group] += count
        return True

    def match_prefix(self, request: Request, max_restored: int) -> PrefixMatch:
        """Share cached pages in place of reserved ones, from where the request stands, as far as there are any.

        Pages that the host has are restored, at most `max_restored` of all requests before the next `take_moves`.
        Where windows need more for the next border, that is restored when nothing else is.
        """
        if request.computed % self._size:
            return PrefixMatch(request.computed, False)
        start = len(request.hold.pages)
        assert request.computed in (0, start * self._size), request.id  # 0: it has just been let in
        if self._finder.by_border:
            return self._match_borders(request, max_restored)
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
            else:
                break
            hold.pages.append(page)
            hold.reserves[0] -= 1
            self._note_cached(request)
        return PrefixMatch(len(hold.pages) * self._size, waits)

    def lookup(self, request: Request) -> int:
        """The position up to which a request's tokens are computed or cached; looks further than last time only."""
        if request.computed % self._size:
            return request.computed
        hold, start = request.hold, request.computed // self._size
        known = max(start, hold.chain_until)
        chain = longest_chain(self.groups, hold.digests, known, self._finder.most_shared(request), self._pool.has)
        if not self._finder.by_border:
            hold.cached_until = chain * self._size
        elif chain > known or hold.cached_until < request.computed or self.states is not None:
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

    def reserved_tokens(self, request: Request) -> int:
        """Tokens that a request may grow to without being refused."""
        return request.hold.promised * self._size

    def longest_chunk(self, request: Request) -> int:
        """How many tokens a request can have computed in its next step: its windows' pages are dropped step by step.

        Some are always there, once no step in flight computes others of it. Of what is there half is left to the step
        after, so that two may be in flight.
        """
        hold = request.hold
        if not self._has_windows:
            return hold.promised * self._size
        windowed = self.groups.windowed
        pages = min(hold.reserves[group] for group in windowed) + self._pool.num_available // len(windowed)
        return len(hold.pages) * self._size - request.computed + (pages + 1) // 2 * self._size

    def allocate(self, request: Request, length: int) -> None:
        """Give a request ids of those reserved pages that its first `length` tokens need.

        A window that has fewer reserved takes what is free besides: see `longest_chunk`.
        """
        hold = request.hold
        missing = self._pool.pages_for(length) - len(hold.pages)
        if missing <= 0:
            return
        for group, table in enumerate(hold.tables):
            if (short := missing - hold.reserves[group]) > 0:
                granted = self._pool.reserve(short)
                assert granted, f"{request.id} computes more than longest_chunk allows"
                hold.reserves[group] += short
            table += self._pool.allocate(missing)
            hold.reserves[group] -= missing

    def drop(self, request: Request, position: int) -> None:
        """Take back the pages that no window sees from `position` on, before which all tokens are settled."""
        if not self._has_windows:
            return
        hold, border = request.hold, position // self._size
        answering = request.known - position <= 1 + request.redo
        if border > hold.settled or answering != hold.answering:
            hold.settled, hold.answering = border, answering
            self._drop_behind(request, border)
            self._trim(hold)

    def commit(self, request: Request, start: int, end: int, *, in_flight: bool = False) -> bool:
        """Let others share the pages that computing tokens `start` to `end` has filled; whether there are any.

        With `in_flight` a step is still filling them: others compute later than it, but should it fail, there must be
        no copy of them, see `invalidate_unfinished`.
        """
        first, last = start // self._size, end // self._size
        if self._hasher is None or (first >= last and self.states is None):
            return False
        self.hash(request)
        left = self.states is not None and not in_flight and self.states.commit(request, end)
        if first >= last:
            return left
        hold = request.hold
        for group, table in enumerate(hold.tables):
            for page in range(max(first, hold.first[group]), last):
                self._pool.cache.insert(table[page], key(hold.digests[page], group))
        if in_flight:
            self._pool.unfinished.update(hold.held(self._all))
        return True

    def finish_steps(self) -> None:
        """Note that no step is in flight: what was committed before its end is there."""
        self._pool.unfinished.clear()
        if self.states is not None:
            self.states.finish_steps()

    def settle_drafts(self, request: Request, end: int) -> int:
        """The drafts of a request's step in flight stand up to `end`; the position from which it goes on.

        A state cannot be cut: unless all stand it goes on from where the step began.
        """
        return end if self.states is None else self.states.settle_drafts(request, end)

    def leave(self, request: Request, end: int, *, in_flight: bool = False) -> None:
        """Keep the state of a request that is about to be freed, where that is one up to `end`; see `commit`."""
        if self.states is not None and self._hasher is not None:
            self.hash(request)
            self.states.leave(request, end, in_flight=in_flight)

    def invalidate_unfinished(self) -> None:
        """See that nobody shares what was committed before the end of a step that has failed."""
        self._pool.invalidate(self._pool.unfinished)
        self._pool.unfinished.clear()
        if self.states is not None:
            self.states.invalidate_unfinished()

    def invalidate(self, request: Request) -> None:
        """See that nobody shares what a request holds, since it may be wrong."""
        hold = request.hold
        self._pool.invalidate(hold.held(self._all))
        # By digest, too: where another page on the device has the same contents, this request's is not in the cache.
        self._pool.remove_copies(self._finder.keys(hold, self._all, 0, len(hold.pages)))
        # What windows have left behind is held no more, and may be wrong as well.
        for group in self.groups.windowed:
            self._pool.invalidate_digests(self._finder.keys(hold, (group,), 0, hold.first[group]))
        if self.states is not None:
            self.states.invalidate(request)

    def free(self, request: Request, keep_until: float | None = None) -> None:
        """Take everything back; with `keep_until`, full pages are evicted after others until that time."""
        hold, pool = request.hold, self._pool
        # The last token of an answer depends on all before it. It may itself be in a page: nobody knows what it gave.
        sound = 0 if request.finish_reason is None else (request.known - 1) // self._size
        for table, first in zip(hold.tables, hold.first, strict=True):
            pool.mark_clean(table[first:sound])
            pool.mark_unclean(table[max(first, sound) :])
        # What windows have dropped and is worth keeping ages from now on, as the pages that were held until now.
        kept = {
            page: place
            for place, page, digest in hold.kept
            if pool.cache.digest_of(page) == digest and not pool.holders(page)
        }
        pages = hold.in_order([(place, page) for page, place in kept.items()])
        if keep_until is not None:
            pool.cache.retain(pages, keep_until)
        pool.free(pages, hold.reserved, hold.held(self.groups.windowed), kept)
        hold.clear(len(self._all))
        if self.states is not None:
            self.states.free(request, keep_until)

    def expire(self, now: float) -> None:
        """End the retention of pages whose time has come."""
        self._pool.cache.expire(now)
        if self.states is not None:
            self.states.expire(now)

    def take_moves(self) -> CacheMoves:
        """What has to be copied and cleaned for the step that has been planned, since the last call."""
        if self.states is not None:
            self.states.save_ahead()
        return self._pool.take_moves()

    def moves_launched(self) -> None:
        """The copies of the last `take_moves` are on their way: steps to come may read what is restored."""
        if self._pool.host is not None:
            self._pool.host.launched()

    def moves_failed(self, moves: CacheMoves, requests: list[Request]) -> list[Request]:
        """The copies of the last `take_moves` failed: nobody shares them. Which `requests` cannot go on without."""
        assert self._pool.host is not None
        self._pool.host.failed(moves)
        pages = {copy.at for copy in moves.restored if not copy.is_state}
        slots = {copy.at for copy in moves.restored if copy.is_state}
        held = ((request, request.hold.held(self._all), request.states.pinned) for request in requests)
        return [r for r, tables, pinned in held if not (pages.isdisjoint(tables) and slots.isdisjoint(pinned))]

    def check(self, requests: list[Request]) -> None:
        """Assert that these are all who hold pages, and that nobody writes to a page that others may read."""
        pool, windowed = self._pool, self.groups.windowed
        backed = [page for request in requests for page in request.hold.held(windowed)] if windowed else []
        pool.check([r.hold.held(self._all) for r in requests], [r.hold.reserved for r in requests], backed)
        if self.states is not None:
            self.states.check(requests)
        for request in requests:
            hold = request.hold
            assert len(hold.pages) * self._size >= request.computed, request.id
            assert self.reserved_tokens(request) <= pool.pages_for(request.max_length) * self._size, request.id
            for group, table in enumerate(hold.tables):
                first = hold.first[group]
                assert len(table) == len(hold.pages), f"{request.id} has tables of several lengths"
                assert table[:first] == [DROPPED] * first, f"{request.id} has dropped other pages than it says"
                assert DROPPED not in table[first:], f"{request.id} has dropped a page that it may need"
                assert first <= self.groups.first(group, request.computed // self._size), f"{request.id} lacks a page"
                promise = self.groups.promise(group, hold.promised, first, hold.answering)
                assert len(table) - first + hold.reserves[group] >= promise, f"{request.id} lacks a promised page"
                for page in table[request.computed // self._size :]:
                    assert pool.holders(page) == 1, f"{request.id} writes to page {page}, which others read"
                    assert not pool.cache.has(page), f"{request.id} writes to page {page}, which is cached"

    def _apart(self, pages: list[list[int]]) -> tuple[list[int], list[int]]:
        """The pages of all full groups, and those of all windows."""
        full, windowed = self.groups.full, self.groups.windowed
        return [p for group in full for p in pages[group]], [p for group in windowed for p in pages[group]]

    def _missing(self, hold: PageHold, pages: int, border: int | None) -> list[int]:
        """Of each group the pages that it lacks for a sequence of `pages` pages: of a request that stands at a border
        and holds what it needs there, or, with None, holds what it does."""
        groups, missing = self.groups, []
        for group in self._all:
            if border is None:
                first, answering = hold.first[group], hold.answering
                held = len(hold.pages) - first + hold.reserves[group]
            else:
                first, answering = groups.first(group, border), False
                held = border - first
            missing.append(max(0, groups.promise(group, pages, first, answering) - held))
        return missing

    def _match_borders(self, request: Request, max_restored: int) -> PrefixMatch:
        """As `match_prefix`, from border to border: windows have pages for some only, and states copies at some."""
        hold, pool, groups = request.hold, self._pool, self.groups
        start = len(hold.pages)
        here = PrefixMatch(start * self._size, False)
        chain = longest_chain(groups, hold.digests, start, self._finder.most_shared(request), pool.has)
        border = self._finder.usable(request, start, chain)
        away = self._finder.away(request, start, border)
        if self._finder.places(away) > max(0, max_restored - pool.num_restoring):
            if pool.num_restoring:
                return here._replace(waits=True)
            reach = self._finder.reach(hold, start, chain, max_restored)
            nearer = self._finder.usable(request, start, reach)
            border = nearer if nearer > start else border
            away = self._finder.away(request, start, border)
        if border == start:
            return here
        if any(pool.is_restoring(name) for name in away.keys):
            return here._replace(waits=True)
        pool.pin_away(away.keys)
        if self.states is not None:
            copy = self._finder.copy_at(request, border)
            if copy is None or not self.states.start_from(request, copy):
                return here
        self._drop_behind(request, border)
        places: list[tuple[list[int], int]] = []  # of what is restored, in the order of `away`
        for group, table in enumerate(hold.tables):
            first = max(start, groups.first(group, border))
            table += [DROPPED] * (first - start)
            for digest in self._finder.keys(hold, (group,), first, border):
                page = pool.cache.lookup(digest)
                if page is None:
                    places.append((table, len(table)))
                    table.append(DROPPED)
                else:
                    pool.share(page, backed=group in groups.windowed)
                    table.append(page)
                hold.reserves[group] -= 1
        # Last, since it may take the place of idle pages.
        for (table, place), page in zip(places, pool.restore(away.pages) if places else (), strict=True):
            table[place] = page
        hold.settled = border
        self._trim(hold)
        self._note_cached(request)
        return PrefixMatch(border * self._size, bool(away.keys))

    def _drop_behind(self, request: Request, border: int) -> None:
        """Drop what no window sees behind a border of so many pages."""
        hold, pool = request.hold, self._pool
        for group in self.groups.windowed:
            table, before = hold.tables[group], hold.first[group]
            after = min(self.groups.first(group, border), len(table))
            for place in range(before, after):
                page, table[place] = table[place], DROPPED
                if request.known <= request.prompt_tokens:
                    pool.mark_unclean([page])  # no answer has been drawn that depends on it
                worth = is_worth_keeping(self.groups, request, group, place)
                if worth and (digest := pool.cache.digest_of(page)) is not None:
                    hold.kept.append((place, page, digest))
                pool.drop(page, worth=worth)
                hold.reserves[group] += 1
            hold.first[group] = max(before, self.groups.first(group, border))

    def _trim(self, hold: PageHold) -> None:
        """Take back what windows have reserved beyond their promise."""
        for group in self.groups.windowed:
            first = hold.first[group]
            promise = self.groups.promise(group, hold.promised, first, hold.answering)
            if (surplus := min(hold.reserves[group], len(hold.pages) - first + hold.reserves[group] - promise)) > 0:
                self._pool.unreserve(surplus)
                hold.reserves[group] -= surplus

    def _note_cached(self, request: Request) -> None:
        if not request.preempted:
            request.hold.cached_tokens = len(request.hold.pages) * self._size
