"""The pages of requests, from the reservation to the end: the scheduler's only way to the KV cache.

    verb          | what it does
    --------------+-------------------------------------------------------------------------------------
    reserve       | promises a request pages up to a length; they are allocated without being refused then
    match_prefix  | gives a request cached pages in place of reserved ones
    allocate      | gives a request ids for reserved pages
    commit        | puts full pages into the prefix cache: others may share them
    invalidate    | takes pages out of the prefix cache, since their contents may be wrong
    free          | takes everything back; cached pages can still be matched until they are evicted

Pages are evicted by the pool, when it allocates and none is free. When anything of this happens is for the scheduler to
say.
"""

from __future__ import annotations

from typing import NamedTuple

from longreach.engine.kv_cache.offload_index import PageMoves
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.kv_cache.state_allocator import StateAllocator
from longreach.engine.kv_cache.state_pool import FoundCopy
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

    `states` has the slots of a model that keeps recurrent states. A prefix of such a one is usable up to a position
    where it has both: cached pages before, and a copy of the state.
    """

    def __init__(self, pool: PagePool, hasher: PageHasher | None = None, states: StateAllocator | None = None) -> None:
        self._pool = pool
        self._hasher = hasher
        self.states = states
        assert states is None or pool.host is None, "states are not kept in host memory, and pages alone are of no use"
        self._size = pool.page_size

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self._pool.num_pages

    @property
    def num_tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self._pool.num_pages * self._size

    @property
    def num_available(self) -> int:
        """Pages that can still be reserved."""
        return self._pool.num_available

    @property
    def usage(self) -> PageUsage:
        """How many pages and slots there are, and how many are in use."""
        pool, host = self._pool, self._pool.host
        slots = (0, 0) if host is None else (host.num_slots, host.num_used)
        return PageUsage(pool.num_pages, pool.num_free, pool.cache.num_idle, *slots)

    def hash(self, request: Request) -> None:
        """Make the digests of a request's full pages, as far as it does not have them."""
        if self._hasher is not None:
            tokens = request.tokens[: request.known] if request.pending else request.tokens
            spec, digests = request.spec, request.hold.digests
            self._hasher.extend(digests, tokens, spec.cache_salt, spec.attention.key, request.prompt_tokens)

    def add(self, request: Request) -> None:
        """Take note of a request that is new."""
        self.hash(request)
        if self.states is not None:
            self.states.add(request)

    def can_reserve(self, request: Request, length: int) -> bool:
        """Whether `reserve` would do it for a request that holds nothing."""
        shared, start = self._match(request)
        if self.states is not None and not self.states.can_reserve(start):
            return False
        return self._pool.can_reserve(self._pool.pages_for(length) - len(shared), shared)

    def reserve(self, request: Request, length: int) -> bool:
        """Reserve pages for a request's first `length` tokens, or change nothing: False.

        A request that holds nothing shares the cached pages of its prefix, and has `length` less these reserved.
        """
        hold = request.hold
        is_new = not hold.pages and not hold.reserved
        shared, start = self._match(request) if is_new else ([], None)
        missing = self._pool.pages_for(length) - len(hold.pages) - len(shared) - hold.reserved
        if missing <= 0 and not shared:
            return True
        if is_new and self.states is not None and not self.states.can_reserve(start):
            return False
        if not self._pool.reserve(missing, shared):
            return False
        if is_new and self.states is not None:
            assert self.states.reserve(request, start)
        hold.reserved += missing
        if shared:
            hold.pages = shared
            self._note_cached(request)
        return True

    def match_prefix(self, request: Request, max_restored: int) -> PrefixMatch:
        """Share cached pages in place of reserved ones, from where the request stands, as far as there are any.

        Pages that the host has are restored, at most `max_restored` of all requests before the next `take_moves`.
        """
        if request.computed % self._size:
            return PrefixMatch(request.computed, False)
        hold, pool = request.hold, self._pool
        assert request.computed in (0, len(hold.pages) * self._size), request.id  # 0: it has just been let in
        waits = False
        most = self._most_shared(request)
        if self.states is not None:
            found = self._start_further(request, self.states)
            most = len(hold.pages) if found is None else found.depth
        for digest in hold.digests[len(hold.pages) : most]:
            if pool.is_restoring(digest):
                waits = True  # for another request's page
                break
            if (page := pool.cache.lookup(digest)) is not None:
                pool.share(page)
            elif pool.host is not None and digest in pool.host:
                waits = True
                if pool.num_restoring >= max_restored:
                    break
                page = pool.restore(digest)
            else:
                break
            hold.pages.append(page)
            hold.reserved -= 1
            self._note_cached(request)
        return PrefixMatch(len(hold.pages) * self._size, waits)

    def lookup(self, request: Request) -> int:
        """The position up to which a request's tokens are computed or cached; looks further than last time only."""
        if request.computed % self._size:
            return request.computed
        hold = request.hold
        page = max(request.computed, hold.cached_until) // self._size
        while page < self._most_shared(request) and self._pool.has(hold.digests[page]):
            page += 1
        hold.cached_until = page * self._size
        if self.states is None:
            return hold.cached_until
        found = self.states.longest(request, request.computed // self._size, page)
        return request.computed if found is None else found.depth * self._size

    def awaits(self, request: Request, start: int, ahead: Request, end: int) -> bool:
        """Whether a request, which could compute from `start` on, waits for one that is computed up to `end`.

        It does where that one goes on to leave a copy of its state from which the request can start further on.
        """
        if ahead is request or end < start:
            return False
        digests, last = request.hold.digests, self._most_shared(request)
        depths = (border // self._size for border in ahead.states.borders if border > start and border >= end)
        return any(depth <= last and ahead.hold.digests[depth - 1] == digests[depth - 1] for depth in depths)

    def digests(self, request: Request, start: int, end: int) -> list[bytes]:
        """Those of the pages that hold tokens `start` to `end`, of those that have any."""
        return request.hold.digests[start // self._size : self._pool.pages_for(end)]

    def first_of(self, digests: set[bytes], request: Request, start: int, end: int) -> int:
        """The first position from `start` to `end` at which a page with one of these digests begins; `end` if none."""
        last = min(self._pool.pages_for(end), self._most_shared(request))
        for page in range(self._pool.pages_for(start), last):
            if request.hold.digests[page] in digests:
                return page * self._size
        return end

    def reserved_tokens(self, request: Request) -> int:
        """Tokens that a request's pages hold, those counted that are only reserved."""
        return (len(request.hold.pages) + request.hold.reserved) * self._size

    def allocate(self, request: Request, length: int) -> None:
        """Give a request ids of those reserved pages that its first `length` tokens need."""
        missing = self._pool.pages_for(length) - len(request.hold.pages)
        if missing > 0:
            request.hold.pages += self._pool.allocate(missing)
            request.hold.reserved -= missing

    def commit(self, request: Request, start: int, end: int, *, in_flight: bool = False) -> bool:
        """Let others share the pages that computing tokens `start` to `end` has filled; whether there are any.

        With `in_flight` a step is still filling them: others compute later than it, but should it fail, there must be
        no copy of them, see `invalidate_unfinished`.
        """
        first, last = start // self._size, end // self._size
        if self._hasher is None:
            return False
        if self.states is not None and not in_flight:
            self.hash(request)
            left = self.states.commit(request, end)
        else:
            left = False
        if first >= last:
            return left
        self.hash(request)
        for page in range(first, last):
            self._pool.cache.insert(request.hold.pages[page], request.hold.digests[page])
        if in_flight:
            self._pool.unfinished.update(request.hold.pages)
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
        self._pool.invalidate(request.hold.pages)
        # By digest, too: where another page on the device has the same contents, this request's is not in the cache.
        self._pool.remove_copies(request.hold.digests[: len(request.hold.pages)])
        if self.states is not None:
            self.states.invalidate(request)

    def free(self, request: Request, keep_until: float | None = None) -> None:
        """Take everything back; with `keep_until`, full pages are evicted after others until that time."""
        hold, pool = request.hold, self._pool
        # The last token of an answer depends on all before it. It may itself be in a page: nobody knows what it gave.
        sound = 0 if request.finish_reason is None else (request.known - 1) // self._size
        pool.mark_clean(hold.pages[:sound])
        pool.mark_unclean(hold.pages[sound:])
        if keep_until is not None:
            pool.cache.retain(hold.pages, keep_until)
        pool.free(hold.pages, hold.reserved)
        hold.pages, hold.reserved, hold.cached_until = [], 0, 0
        if self.states is not None:
            self.states.free(request, keep_until)

    def expire(self, now: float) -> None:
        """End the retention of pages whose time has come."""
        self._pool.cache.expire(now)
        if self.states is not None:
            self.states.expire(now)

    def take_moves(self) -> PageMoves:
        """What has to be copied and cleaned for the step that has been planned, since the last call."""
        return self._pool.take_moves()

    def moves_launched(self) -> None:
        """The copies of the last `take_moves` are on their way: steps to come may read what is restored."""
        self._pool.moves_launched()

    def moves_failed(self, moves: PageMoves, requests: list[Request]) -> list[Request]:
        """The copies of the last `take_moves` failed: nobody shares them. Which `requests` cannot go on without."""
        wrong = self._pool.moves_failed(moves)
        return [request for request in requests if not wrong.isdisjoint(request.hold.pages)]

    def check(self, requests: list[Request]) -> None:
        """Assert that these are all who hold pages, and that nobody writes to a page that others may read."""
        pool = self._pool
        if self.states is not None:
            self.states.check(requests)
        pool.check([r.hold.pages for r in requests], [r.hold.reserved for r in requests])
        for request in requests:
            pages = request.hold.pages
            assert len(pages) * self._size >= request.computed, request.id
            assert self.reserved_tokens(request) <= pool.pages_for(request.max_length) * self._size, request.id
            for page in pages[request.computed // self._size :]:
                assert pool.holders(page) == 1, f"{request.id} writes to page {page}, which others read"
                assert not pool.cache.has(page), f"{request.id} writes to page {page}, which is cached"

    def _match(self, request: Request) -> tuple[list[int], FoundCopy | None]:
        """The cached pages of a request's prefix that it can use, and the copy of the state at their end."""
        pages = self._pool.match(request.hold.digests[: self._most_shared(request)])
        if self.states is None:
            return pages, None
        start = self.states.longest(request, 0, len(pages))
        depth = 0 if start is None else start.depth
        self.states.add_border(request, len(pages))
        return pages[:depth], start

    def _start_further(self, request: Request, states: StateAllocator) -> FoundCopy | None:
        """Have a running request start from a copy further on, up to which all pages are cached; None if none is."""
        first = len(request.hold.pages)
        cached = len(self._pool.match(request.hold.digests[first : self._most_shared(request)]))
        start = states.longest(request, first, first + cached)
        return start if start is not None and states.start_from(request, start) else None

    def _note_cached(self, request: Request) -> None:
        if not request.preempted:
            request.hold.cached_tokens = len(request.hold.pages) * self._size

    def _most_shared(self, request: Request) -> int:
        """How many of its first pages a request can share, given what it has to compute itself."""
        return min(len(request.hold.digests), request.skippable // self._size)
