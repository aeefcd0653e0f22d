"""Who holds which page of the KV cache. Ids only; the tensors behind them live in `longreach_patches.cache.pages`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.kv_cache.prefix_cache import PrefixCache


class PagePool:
    """A fixed number of pages: held by one or more requests, idle in the prefix cache, or free.

    `reserve` promises pages without saying which, so that a request which has been let in can always grow to its end;
    `allocate` says which when they are needed, and evicts idle pages when none is free.

    A page of a request that did not finish may hold NaN. Kernels read whole tiles, past a sequence's end, and rely on a
    weight of 0 there, which makes 0 of a number only. So an unclean page is cleaned after it is allocated, and before
    anything is computed with it.

    A page of a *window* is dropped while its request goes on, which then needs another: so each of its holders but one
    has a page kept back for it, by `backed`. A page of a full group is held to the end, and one does for all.

    With `host` what is evicted is kept in host memory, and can be restored. What has to be copied and cleaned is
    collected, and taken by `take_moves` once a step.
    """

    def __init__(self, num_pages: int, page_size: int, host: HostTier | None = None) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.cache = PrefixCache(num_pages)
        # A stack: the page freed last is allocated first, while its memory may still be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._reserved = 0  # those included that are kept back for windows' pages
        self._kept_back = 0
        self._maybe_unclean: set[int] = set()
        self._unclean: list[int] = []
        self.host = host
        # Cached pages that a step in flight fills: others may compute with them after it. Should it fail, there must be
        # no copy of them.
        self.unfinished: set[int] = set()
        self._allocated = 0

    @property
    def num_free(self) -> int:
        """Pages that hold nothing, reserved ones included."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that nobody holds (idle ones can be evicted) and nobody has reserved."""
        return len(self._free) + self.cache.num_idle - self._reserved

    @property
    def disk(self) -> DiskTier | None:
        """What is kept below host memory, if anything is."""
        return None if self.host is None else self.host.disk

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence fill."""
        return -(-num_tokens // self.page_size)

    def holders(self, page: int) -> int:
        """How many requests hold a page."""
        return self._holders[page]

    def match(self, digests: list[bytes]) -> list[int]:
        """The pages of the longest beginning of `digests` that the prefix cache has."""
        pages = []
        for digest in digests:
            if (page := self.cache.lookup(digest)) is None:
                break
            pages.append(page)
        return pages

    def is_there(self, digest: bytes, page: int) -> bool | None:
        """Whether a page is the cached one with this digest; None if a step in flight fills it."""
        if self.cache.digest_of(page) != digest:
            return False
        return None if page in self.unfinished else True

    def has(self, digest: bytes) -> bool:
        """Whether a page with this digest can be shared or restored."""
        return self.cache.lookup(digest) is not None or (self.host is not None and digest in self.host)

    def can_reserve(self, count: int, shared: Sequence[int] = (), backed: Sequence[int] = ()) -> bool:
        """Whether `reserve` would do it."""
        return self.wanted(count, shared, backed) <= self.num_available

    def wanted(self, count: int, shared: Sequence[int] = (), backed: Sequence[int] = ()) -> int:
        """How many pages must be available for `reserve` to do it."""
        return count + sum(self._holders[page] == 0 for page in shared) + len(backed)

    def reserve(self, count: int, shared: Sequence[int] = (), backed: Sequence[int] = ()) -> bool:
        """Reserve `count` pages and hold the cached pages `shared` of full groups and `backed` of windows, or change
        nothing and return False."""
        if not self.can_reserve(count, shared, backed):
            return False
        self._reserved += count + len(backed)
        for page in shared:
            self._hold(page)
        for page in backed:
            self.share(page, backed=True)
        return True

    def unreserve(self, count: int) -> None:
        """Take back `count` reserved pages."""
        self._reserved -= count

    def allocate(self, count: int) -> list[int]:
        """The ids of `count` of the reserved pages."""
        assert 0 <= count <= self._reserved, (count, self._reserved)
        self._reserved -= count
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._allocated += count
        for page in pages:
            self._holders[page] = 1
        if self._maybe_unclean:
            unclean = self._maybe_unclean.intersection(pages)
            self._maybe_unclean -= unclean
            self._unclean += sorted(unclean)
        return pages

    def mark_unclean(self, pages: Iterable[int]) -> None:
        """Note that these pages may hold NaN."""
        self._maybe_unclean.update(pages)

    def mark_clean(self, pages: list[int]) -> None:
        """Note that these pages hold numbers: an answer that depends on all of them has been drawn."""
        if self._maybe_unclean:
            self._maybe_unclean.difference_update(pages)

    @property
    def num_restoring(self) -> int:
        """Pages that have been restored since the last copies were issued; a state counts as many as it takes."""
        return 0 if self.host is None else self.host.num_restoring

    def is_restoring(self, name: bytes) -> bool:
        """Whether the entry with this key has been restored since the last copies were issued."""
        return self.host is not None and self.host.is_restoring(name)

    def pin_away(self, names: list[bytes]) -> None:
        """See that the host keeps the entries with these keys, which it has, until they are restored in this step."""
        if self.host is not None:
            self.host.pin(names)

    def restore(self, digests: list[bytes], *, findable: bool = True) -> list[int]:
        """Allocate reserved pages for what the host has under these digests; nobody else finds them yet, and only if
        they are `findable` once their copies have been issued."""
        assert self.host is not None
        self.host.pin(digests)  # the allocated pages may be kept in host memory themselves
        pages = self.allocate(len(digests))
        for digest, page in zip(digests, pages, strict=True):
            used = self.host.index.used(digest)
            self.host.restore(digest, page, partial(self.cache.insert, page, digest, used) if findable else _nothing)
        return pages

    def put_back(self, page: int) -> None:
        """Take back a page that one request holds and nobody finds, and reserve another for it."""
        assert self._holders[page] == 1, page
        assert not self.cache.has(page), page
        self._holders[page] = 0
        self._reserved += 1
        self.mark_unclean([page])
        self._free.append(page)

    def take_moves(self) -> CacheMoves:
        """What has to be done to pages, and to states, for the step that has been planned, since the last call.

        As many pages are saved ahead as this step allocated, of those that are evicted next. So a page has its copy
        when it is evicted, while prompts are read, and no step has to wait for that.
        """
        unclean, self._unclean = self._unclean, []
        allocated, self._allocated = self._allocated, 0
        if self.host is None:
            return CacheMoves([], unclean, [], [])
        for page, digest in self.cache.next_evicted(max(0, allocated - len(self._free))):
            if self._is_worth_copying(page):
                self.host.save_ahead(digest, page, used=self.cache.used(page))
        return self.host.take(unclean)

    def share(self, page: int, *, backed: bool = False) -> None:
        """Hold a cached page in place of a reserved one, which is kept back if the page is `backed` and held."""
        assert self._reserved, "nothing was reserved"
        if backed and self._holders[page]:
            self._kept_back += 1
        else:
            self._reserved -= 1
        self._hold(page)

    def drop(self, page: int, *, worth: bool) -> None:
        """Take back a window's page and reserve another for its request; one that is cached stays so, and is given up
        before all others unless it is `worth` more."""
        self._holders[page] -= 1
        if self._holders[page]:
            self._kept_back -= 1
            return
        self._reserved += 1
        if not self.cache.has(page):
            self._free.append(page)
        elif worth:
            self.cache.free([page])
        else:
            self.cache.pass_by(page)

    def free(self, pages: list[int], reserved: int, backed: Collection[int] = (), idle: Collection[int] = ()) -> None:
        """Take back a request's pages, in the order of its sequence, and what it had reserved beside them. Those that
        are `backed` are windows'; those that are `idle` are so already, and become so again beside the others."""
        assert 0 <= reserved <= self._reserved, (reserved, self._reserved)
        self._reserved -= reserved
        for page in pages:
            if page not in idle:
                self._holders[page] -= 1
        released = sum(self._holders[page] > 0 for page in backed)
        self._kept_back -= released
        self._reserved -= released
        left = [page for page in pages if not self._holders[page]]
        self.cache.free([page for page in left if self.cache.has(page)])
        self._free.extend(page for page in reversed(left) if not self.cache.has(page))

    def invalidate(self, pages: Iterable[int]) -> None:
        """See that nobody shares what these pages, held, idle or free, contain: it may be wrong."""
        self.mark_unclean(pages)
        for page in pages:
            if (digest := self.cache.digest_of(page)) is not None:
                self.cache.remove(page)
                self.remove_copies([digest])
                if not self._holders[page]:
                    self._free.append(page)

    def invalidate_digests(self, digests: Iterable[bytes]) -> None:
        """See that nobody shares or restores what is known by these digests."""
        for digest in digests:
            if (page := self.cache.lookup(digest)) is not None:
                self.invalidate([page])
            self.remove_copies([digest])

    def remove_copies(self, digests: Iterable[bytes]) -> None:
        """See that nobody restores what the host has under these digests."""
        if self.host is not None:
            self.host.remove(digests)

    def check(self, held: list[list[int]], reserved: list[int], backed: Sequence[int] = ()) -> None:
        """Assert that the pages `held` by each request, the idle and the free ones are exactly all pages; those that
        are `backed` are windows', each as often as it is held."""
        holders = Counter(page for pages in held for page in pages)
        assert all(self._holders[page] == holders[page] for page in range(self.num_pages)), "a holder is not known"
        idle = set(range(self.num_pages)) - set(holders) - set(self._free)
        assert len(self._free) == len(set(self._free)), "a page is free twice"
        assert not set(self._free) & set(holders), "a page is free and held"
        self.cache.check(idle)
        assert not any(self.cache.has(page) for page in self._free), "a free page is cached"
        assert self._kept_back == len(backed) - len(set(backed)), "pages of windows are not backed as they are held"
        wanted = sum(reserved) + self._kept_back
        assert wanted == self._reserved, f"reserved {self._reserved}, by requests {wanted}"
        assert self._reserved <= len(self._free) + len(idle), "more pages are reserved than could be allocated"
        if self.host is not None:
            self.host.check()

    def _evict(self) -> int:
        [(page, digest)] = self.cache.next_evicted(1)
        if self.host is not None and self._is_worth_copying(page):
            self.host.evict(digest, page, used=self.cache.used(page))
        self.cache.remove(page)
        return page

    def _is_worth_copying(self, page: int) -> bool:
        """Whether an idle page is kept in host memory: a step in flight does not fill it, and somebody may want it."""
        return page not in self.unfinished and not self.cache.is_passed(page)

    def _hold(self, page: int) -> None:
        self._holders[page] += 1
        self.cache.touch(page)


def _nothing() -> None:
    pass
