"""Who holds which page of the KV cache. Ids only; the tensors behind them live in `longreach_patches.pages`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from longreach.engine.kv_cache.offload_index import HostPages, PageMoves
from longreach.engine.kv_cache.prefix_cache import PrefixCache


class PagePool:
    """A fixed number of pages: held by one or more requests, idle in the prefix cache, or free.

    `reserve` promises pages without naming them, so that a request which has been let in can always grow to its end;
    `take` names them when they are needed, and evicts idle pages when none is free.

    What is left in a page of a request that did not finish may be no number. Kernels read whole tiles, past a
    sequence's end, and rely on a weight of 0 there, which makes 0 of a number only: a `suspect` page has to be cleaned
    between being handed out and being computed with.

    With `host` what is evicted is kept in host memory, and can be brought back. What has to be copied and cleaned for
    that is collected, and handed out by `moves` once a step.
    """

    def __init__(self, num_pages: int, page_size: int, host: HostPages | None = None) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.cache = PrefixCache(num_pages)
        # A stack: the page freed last is handed out first, while its memory may still be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._promised = 0
        self._suspect: set[int] = set()
        self._unclean: list[int] = []
        self.host = host
        # Named pages that a step in flight fills: others may compute with them after it, but should it fail, there must
        # be no copy of them.
        self.early: set[int] = set()
        self._taken = 0
        self._evicted: list[tuple[int, int]] = []
        self._restored: dict[bytes, tuple[int, int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that hold nothing, promised ones included."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that nobody holds (idle ones can be evicted) and nobody has been promised."""
        return len(self._free) + self.cache.num_idle - self._promised

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence fill."""
        return -(-num_tokens // self.page_size)

    def holders(self, page: int) -> int:
        """How many requests hold a page."""
        return self._holders[page]

    def find(self, digests: list[bytes]) -> list[int]:
        """The pages of the longest beginning of `digests` that the prefix cache has."""
        pages = []
        for digest in digests:
            if (page := self.cache.find(digest)) is None:
                break
            pages.append(page)
        return pages

    def has(self, digest: bytes) -> bool:
        """Whether a page of this name can be taken over or brought back."""
        return self.cache.find(digest) is not None or (self.host is not None and digest in self.host)

    def has_room(self, count: int, shared: list[int]) -> bool:
        """Whether `reserve` would do it."""
        return count + sum(self._holders[page] == 0 for page in shared) <= self.num_available

    def reserve(self, count: int, shared: list[int]) -> bool:
        """Promise `count` pages and hold the named pages `shared`, or change nothing and return False."""
        if not self.has_room(count, shared):
            return False
        self._promised += count
        for page in shared:
            self._share(page)
        return True

    def take(self, count: int) -> list[int]:
        """Hand out `count` of the promised pages."""
        assert 0 <= count <= self._promised, (count, self._promised)
        self._promised -= count
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._taken += count
        for page in pages:
            self._holders[page] = 1
        if self._suspect:
            unclean = self._suspect.intersection(pages)
            self._suspect -= unclean
            self._unclean += sorted(unclean)
        return pages

    def suspect(self, pages: Iterable[int]) -> None:
        """Note that these pages may hold what is no number."""
        self._suspect.update(pages)

    def trust(self, pages: list[int]) -> None:
        """Note that these pages hold numbers: an answer that depends on all of them has been drawn."""
        if self._suspect:
            self._suspect.difference_update(pages)

    @property
    def num_restored(self) -> int:
        """Pages that have been restored since the last call of `moves`."""
        return len(self._restored)

    def is_restored(self, digest: bytes) -> bool:
        """Whether a page of this name has been restored since the last call of `moves`."""
        return digest in self._restored

    def restore(self, digest: bytes) -> int:
        """Hand out one of the promised pages, for what the host has under this name; nobody else finds it yet."""
        assert self.host is not None
        # Looked up first: the page handed out may be kept in a slot itself, which must not be this one.
        slot = self.host.read(digest)
        [page] = self.take(1)
        self._restored[digest] = slot, page
        return page

    def moves(self) -> PageMoves:
        """What has to be done to pages for the step that has been planned, since the last call.

        As many pages are saved ahead as this step took, of those that come next: while prompts are read, a page has
        its copy when it is evicted, and no step has to wait for that.
        """
        saved = []
        if self.host is not None:
            for page, digest in self.cache.coldest(max(0, self._taken - len(self._free))):
                if page not in self.early and (slot := self.host.keep(digest)) is not None:
                    saved.append((page, slot))
            self.host.unpin()
        moves = PageMoves(self._evicted, self._unclean, list(self._restored.values()), saved)
        self._taken, self._evicted, self._unclean = 0, [], []
        return moves

    def arrived(self) -> None:
        """The copies of the last `moves` are on their way: steps to come may read what was restored."""
        for digest, (_, page) in self._restored.items():
            self.cache.name(page, digest)
        self._restored.clear()

    def lost(self, moves: PageMoves) -> set[int]:
        """The copies of the last `moves` failed: nobody gets them; the pages that do not hold what they should."""
        assert self.host is not None
        self.host.forget_slots({slot for _, slot in moves.evicted + moves.saved} | {slot for slot, _ in moves.restored})
        self._restored.clear()
        return {page for _, page in moves.restored}

    def take_over(self, page: int) -> None:
        """Hold a named page in place of a promised one."""
        assert self._promised, "nothing was promised"
        self._promised -= 1
        self._share(page)

    def release(self, pages: list[int], promised: int) -> None:
        """Give back a request's pages, in the order of its sequence, and what it was promised but never took."""
        assert 0 <= promised <= self._promised, (promised, self._promised)
        self._promised -= promised
        for page in pages:
            self._holders[page] -= 1
        left = [page for page in pages if not self._holders[page]]
        self.cache.rest([page for page in left if self.cache.is_named(page)])
        self._free.extend(page for page in reversed(left) if not self.cache.is_named(page))

    def spoil(self, pages: Iterable[int]) -> None:
        """See that nobody takes over what these pages, held, idle or free, contain: it may be wrong."""
        self.suspect(pages)
        for page in pages:
            if (digest := self.cache.name_of(page)) is not None:
                self.cache.forget(page)
                if self.host is not None:
                    self.host.forget(digest)
                if not self._holders[page]:
                    self._free.append(page)

    def check(self, held: list[list[int]], promised: list[int]) -> None:
        """Assert that the pages `held` by each request, the idle and the free ones are exactly all pages."""
        holders = Counter(page for pages in held for page in pages)
        assert all(self._holders[page] == holders[page] for page in range(self.num_pages)), "a holder is not known"
        idle = set(range(self.num_pages)) - set(holders) - set(self._free)
        assert len(self._free) == len(set(self._free)), "a page is free twice"
        assert not set(self._free) & set(holders), "a page is free and held"
        self.cache.check(idle)
        assert not any(self.cache.is_named(page) for page in self._free), "a free page has a name"
        assert sum(promised) == self._promised, f"promised {self._promised}, requests hold {sum(promised)}"
        assert self._promised <= len(self._free) + len(idle), "more pages are promised than could be handed out"
        if self.host is not None:
            self.host.check()

    def _evict(self) -> int:
        page, digest = self.cache.evict()
        if self.host is not None and page not in self.early and (slot := self.host.keep(digest)) is not None:
            self._evicted.append((page, slot))
        return page

    def _share(self, page: int) -> None:
        self._holders[page] += 1
        self.cache.reuse(page)
