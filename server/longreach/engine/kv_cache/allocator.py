"""The pages of requests, from the reservation to the end: the scheduler's only way to the KV cache.

    verb          | what it does
    --------------+-------------------------------------------------------------------------------------
    reserve       | promises a request pages up to a length; they are allocated without being refused then
    prefixes      | gives a request cached pages in place of reserved ones: `prefix_sharing`
    allocate      | gives a request ids for reserved pages
    held          | takes back the pages that a request's windows have left behind: `group_pages`
    commit        | puts full pages into the prefix cache: others may share them
    pinned        | has the entries of pinned prompts evicted last: `pinned_prompts`
    invalidate    | takes pages out of the prefix cache, since their contents may be wrong
    free          | takes everything back; cached pages can still be matched until they are evicted

Layers are in groups, and each group has pages of its own: `groups` has their sizes, `borders` which of them are shared.
Pages are evicted by the pool, when it allocates and none is free. When anything of this happens is for the scheduler to
say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from longreach.engine.kv_cache.borders import key
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.group_pages import GroupPages
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.last_use import page_used
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.kv_cache.page_checks import check_pages
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.pinned_prompts import PinnedPrompts
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.kv_cache.prefix_finder import CachedPrefix, PrefixFinder
from longreach.engine.kv_cache.prefix_sharing import PrefixSharing
from longreach.engine.kv_cache.prompt_uses import PromptUses
from longreach.engine.kv_cache.state_allocator import StateAllocator, StateUsage
from longreach.engine.kv_cache.written_pages import want_filled, want_left
from longreach.engine.requests.page_hold import DROPPED, Sought
from longreach.engine.requests.request import Request


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
        self.states = states
        self._finder = PrefixFinder(pool, self.groups, states)
        self.held = GroupPages(pool, self.groups)
        tiers = [
            pool.cache,
            *([] if pool.host is None else pool.host.tiers),
            *([] if states is None else [states.tier]),
        ]
        self.pinned = PinnedPrompts(tiers, self.groups, hasher, states=states is not None)
        self._uses = PromptUses(pool, self.groups, states)
        self.prefixes = PrefixSharing(pool, self.groups, states, self.held, self._finder, self._uses)

    @property
    def disk(self) -> DiskTier | None:
        """What is kept on disk, if anything is."""
        return self._pool.disk

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self._pool.num_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._size

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
        digests, known = request.hold.digests, request.known if request.pending else len(request.tokens)
        if self._hasher is not None and known // self._size > len(digests):  # a copy of all tokens is not made often
            tokens = request.tokens[:known] if request.pending else request.tokens
            spec = request.spec
            self._hasher.extend(digests, tokens, spec.cache_salt, spec.contents_key, request.prompt_tokens)

    def add(self, request: Request, others: Iterable[Request]) -> None:
        """Take note of a request that is new, beside `others` that are here."""
        self.hash(request)
        if self.states is not None:
            self.states.add(request)
            for other in others:
                self.states.add_parting(request, other)

    def cached(self, request: Sought) -> CachedPrefix:
        """What a request that holds nothing would get now; it changes nothing."""
        return self._finder.cached(request, self.disk)

    def can_reserve(self, request: Request, length: int) -> bool:
        """Whether `reserve` would do it for a request that holds nothing."""
        match = self._finder.match(request)
        if self.states is not None and not self.states.can_reserve(match.start):
            return False
        missing = self.held.missing(request.hold, self._pool.pages_for(length), match.border)
        return self._pool.can_reserve(sum(missing), *self._apart(match.pages))

    def missing(self, request: Sought, length: int) -> int:
        """How many pages must be available for `reserve` to do it for a request that holds nothing."""
        match = self._finder.match(request)
        missing = self.held.missing(request.hold, self._pool.pages_for(length), match.border)
        return self._pool.wanted(sum(missing), *self._apart(match.pages))

    def reserve(self, request: Request, length: int) -> bool:
        """Reserve pages for a request's first `length` tokens, or change nothing: False.

        A request that holds nothing shares the cached pages of its prefix, and has `length` less these reserved.
        """
        hold, pages = request.hold, self._pool.pages_for(length)
        if hold.promised:
            if pages <= hold.promised:
                return True
            missing = self.held.missing(hold, pages, None)
            if not self._pool.reserve(sum(missing)):
                return False
        else:
            match = self._finder.match(request)
            missing = self.held.missing(hold, pages, match.border)
            if self.states is not None and not self.states.can_reserve(match.start):
                return False
            if not self._pool.reserve(sum(missing), *self._apart(match.pages)):
                return False
            if self.states is not None:
                self.states.reserve(request, match.start)
                self.states.add_turn(request, match.chain)
            use = hold.use
            hold.clear(len(self._all))
            hold.use = use
            self._uses.begin(request)
            hold.turns, hold.settled = (match.border, match.chain), match.border
            for group, shared in enumerate(match.pages):
                hold.first[group] = match.border - len(shared)
                hold.tables[group] = [DROPPED] * hold.first[group] + shared
            if match.border:
                self.prefixes.note_cached(request, match.border)
        hold.promised = pages
        for group, count in enumerate(missing):
            hold.reserves[group] += count
        return True

    def reserved_tokens(self, request: Request) -> int:
        """Tokens that a request may grow to without being refused."""
        return request.hold.promised * self._size

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
                name = key(hold.digests[page], group)
                if self._pool.cache.insert(table[page], name, page_used(hold.use, page)):
                    want_filled(self._pool, self.groups, request, group, page)
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
        self.prefixes.ahead.put_back(request)
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
        self._uses.end(request)
        want_left(self._pool, self.groups, request)
        if keep_until is not None:
            pool.cache.retain(pages, keep_until)
        pool.free(pages, hold.reserved, hold.held(self.groups.windowed), kept)
        hold.clear(len(self._all))
        if self.states is not None:
            self.states.free(request, keep_until)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """A request that may wait for what is read from disk does so no more."""
        if self.disk is not None:
            self.disk.reads.forget(request.id)

    def expire(self, now: float) -> None:
        """End the retention of pages whose time has come, and take in what has come from disk."""
        if self.disk is not None:
            self.disk.poll()
        self._pool.cache.expire(now)
        if self.states is not None:
            self.states.expire(now)

    def take_moves(self, *, is_last: bool = False) -> CacheMoves:
        """What has to be copied and cleaned for the step that has been planned, since the last call; if `is_last`, for
        the server's end."""
        if self.states is not None:
            self.states.save_ahead()
        if self.disk is not None:
            self.disk.copy_ahead(self._is_there, is_last=is_last)
        return self._pool.take_moves()

    def moves_launched(self) -> None:
        """The copies of the last `take_moves` are on their way: steps to come may read what is restored."""
        if self._pool.host is not None:
            self._pool.host.launched()
        if self.disk is not None:
            self.disk.launched()

    def moves_failed(self, moves: CacheMoves, requests: list[Request]) -> list[Request]:
        """The copies of the last `take_moves` failed: nobody shares them. Which `requests` cannot go on without."""
        assert self._pool.host is not None
        self._pool.host.failed(moves)
        pages = {copy.at for copy in moves.restored if not copy.is_state}
        slots = {copy.at for copy in moves.restored if copy.is_state}
        failed = []
        for request in requests:
            held = request.hold.held(self._all) + [page for _, page in request.hold.ahead.values()]
            if not (pages.isdisjoint(held) and slots.isdisjoint(request.states.pinned)):
                failed.append(request)
        return failed

    def _is_there(self, name: bytes, at: int, depth: int) -> bool | None:
        """Whether a page, or with its `depth` a slot, has what is known by a key; None if a step in flight fills it."""
        if not depth:
            return self._pool.is_there(name, at)
        assert self.states is not None
        return self.states.is_there(name, at)

    def check(self, requests: list[Request]) -> None:
        """Assert that these are all who hold pages, and that nobody writes to a page that others may read."""
        check_pages(self._pool, self.groups, requests)
        self.prefixes.ahead.check(requests)
        if self.disk is not None:
            self.disk.check()
        if self.states is not None:
            self.states.check(requests)

    def _apart(self, pages: list[list[int]]) -> tuple[list[int], list[int]]:
        """The pages of all full groups, and those of all windows."""
        full, windowed = self.groups.full, self.groups.windowed
        return [p for group in full for p in pages[group]], [p for group in windowed for p in pages[group]]
