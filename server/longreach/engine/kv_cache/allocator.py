"""The pages of requests: shared with others, promised, handed out, named when they are full, and given back.

This is where a request meets the pool and the prefix cache. When anything of it happens is for the scheduler to say.
"""

from __future__ import annotations

from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.requests.request import Request


class Holdings:
    """What requests hold of a pool; without a `hasher` pages have no names, and there is no prefix cache."""

    def __init__(self, pool: PagePool, hasher: PageHasher | None) -> None:
        self.pool = pool
        self._hasher = hasher
        self._size = pool.page_size

    def hash(self, request: Request) -> None:
        """Make the names of a request's full pages, as far as it does not have them."""
        if self._hasher is not None:
            tokens = request.tokens[: request.known] if request.pending else request.tokens
            spec = request.spec
            self._hasher.extend(request.digests, tokens, spec.cache_salt, spec.attention.key, request.prompt_tokens)

    def enter(self, request: Request, length: int) -> bool:
        """Share what the prefix cache has and promise the rest of `length` tokens, or change nothing: False."""
        promised, shared = self._needs(request, length)
        if not self.pool.reserve(promised, shared):
            return False
        request.pages, request.promised_pages = shared, promised
        request.computed = len(shared) * self._size
        if not request.preempted:
            request.cached = request.computed
        return True

    def could_enter(self, request: Request, length: int) -> bool:
        """Whether `enter` would do it."""
        return self.pool.has_room(*self._needs(request, length))

    def _needs(self, request: Request, length: int) -> tuple[int, list[int]]:
        """Of `length` tokens, how many pages have to be promised, and those that the prefix cache has."""
        shared = self.pool.find(request.digests[: self._most_shared(request)])
        return self.pool.pages_for(length) - len(shared), shared

    def take_over(self, request: Request, restorable: int) -> bool:
        """Take the next pages from the prefix cache in place of promised ones, as far as it or the host has them.

        At most `restorable` pages of all requests are brought back from the host before the next `PagePool.moves`.
        Returns whether the request has to wait for such pages before it computes.
        """
        if request.computed % self._size:
            return False
        assert len(request.pages) * self._size == request.computed, request.id
        waits = False
        for digest in request.digests[request.computed // self._size : self._most_shared(request)]:
            if self.pool.is_restored(digest):
                return True  # somebody else has it brought back
            if (page := self.pool.cache.find(digest)) is not None:
                self.pool.take_over(page)
            elif self.pool.host is not None and digest in self.pool.host:
                if self.pool.num_restored >= restorable:
                    return True
                page = self.pool.restore(digest)
                waits = True
            else:
                break
            request.pages.append(page)
            request.promised_pages -= 1
            request.computed += self._size
            if not request.preempted:
                request.cached = request.computed
        return waits

    def reach(self, request: Request) -> int:
        """Where a request stands, counting the pages that it could take over; looks further than last time only."""
        if request.computed % self._size:
            return request.computed
        page = max(request.computed, request.reach) // self._size
        while page < self._most_shared(request) and self.pool.has(request.digests[page]):
            page += 1
        request.reach = page * self._size
        return request.reach

    def claims(self, request: Request, start: int, end: int) -> list[bytes]:
        """The names of the pages that hold tokens `start` to `end`, of those that have any."""
        return request.digests[start // self._size : self.pool.pages_for(end)]

    def unclaimed(self, request: Request, start: int, end: int, claimed: set[bytes]) -> int:
        """The end of the tokens from `start` to `end` before the first page of those that are `claimed`."""
        last = min(self.pool.pages_for(end), self._most_shared(request))
        for page in range(self.pool.pages_for(start), last):
            if request.digests[page] in claimed:
                return page * self._size
        return end

    def promise(self, request: Request, length: int) -> bool:
        """See that a request has a promise to `length` tokens; False, changing nothing, if there are too few pages."""
        missing = self.pool.pages_for(length) - len(request.pages) - request.promised_pages
        if missing > 0:
            if not self.pool.reserve(missing, []):
                return False
            request.promised_pages += missing
        return True

    def places(self, request: Request) -> int:
        """Tokens that a request's pages and promises hold together."""
        return (len(request.pages) + request.promised_pages) * self._size

    def hand_out(self, request: Request, length: int) -> None:
        """Name the promised pages that a request's first `length` tokens need."""
        missing = self.pool.pages_for(length) - len(request.pages)
        if missing > 0:
            request.pages += self.pool.take(missing)
            request.promised_pages -= missing

    def offer(self, request: Request, start: int, end: int) -> bool:
        """Let others have the pages that were filled by computing tokens `start` to `end`; whether there are any."""
        first, last = start // self._size, end // self._size
        if self._hasher is None or first >= last:
            return False
        self.hash(request)
        for page in range(first, last):
            self.pool.cache.name(request.pages[page], request.digests[page])
        return True

    def release(self, request: Request, keep_until: float | None = None) -> None:
        """Give everything back; with `keep_until`, full pages are kept before others until that time."""
        # The last token of an answer depends on all before it. It may itself be in a page: nobody knows what it gave.
        sound = 0 if request.finish_reason is None else (request.known - 1) // self._size
        self.pool.trust(request.pages[:sound])
        self.pool.suspect(request.pages[sound:])
        if keep_until is not None:
            self.pool.cache.retain(request.pages, keep_until)
        self.pool.release(request.pages, request.promised_pages)
        request.pages, request.promised_pages = [], 0

    def spoil(self, request: Request) -> None:
        """See that nobody takes over what a request holds, since it may be wrong."""
        self.pool.spoil(request.pages)
        if self.pool.host is not None:  # by name, too: of contents that others have on the device its page has no name
            for digest in request.digests[: len(request.pages)]:
                self.pool.host.forget(digest)

    def check(self, requests: list[Request]) -> None:
        """Assert that these are all who hold pages, and that nobody writes to a page that others may read."""
        self.pool.check([r.pages for r in requests], [r.promised_pages for r in requests])
        for request in requests:
            assert len(request.pages) * self._size >= request.computed, request.id
            assert self.places(request) <= self.pool.pages_for(request.max_length) * self._size, request.id
            for page in request.pages[request.computed // self._size :]:
                assert self.pool.holders(page) == 1, f"{request.id} writes to page {page}, which others read"
                assert not self.pool.cache.is_named(page), f"{request.id} writes to page {page}, which is named"

    def _most_shared(self, request: Request) -> int:
        """How many of its first pages a request can take over, given what it has to compute itself."""
        return min(len(request.digests), request.skippable // self._size)
