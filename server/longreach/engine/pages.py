"""Who holds which page of the KV cache. Ids only; the tensors behind them live in `longreach_patches.pages`."""

from __future__ import annotations

from collections import Counter

from .prefix_cache import PrefixCache


class PagePool:
    """A fixed number of pages: held by one or more requests, idle in the prefix cache, or free.

    `reserve` promises pages without naming them, so that a request which has been let in can always grow to its end;
    `take` names them when they are needed, and evicts idle pages when none is free.

    What is left in a page of a request that did not finish may be no number. Kernels read whole tiles, past a
    sequence's end, and rely on a weight of 0 there, which makes 0 of a number only: a `suspect` page has to be cleaned
    between being handed out and being computed with (`unclean`).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
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

    def reserve(self, count: int, shared: list[int]) -> bool:
        """Promise `count` pages and hold the named pages `shared`, or change nothing and return False."""
        if count + sum(self._holders[page] == 0 for page in shared) > self.num_available:
            return False
        self._promised += count
        for page in shared:
            self._share(page)
        return True

    def take(self, count: int) -> list[int]:
        """Hand out `count` of the promised pages."""
        assert 0 <= count <= self._promised, (count, self._promised)
        self._promised -= count
        pages = [self._free.pop() if self._free else self.cache.evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        if self._suspect:
            unclean = self._suspect.intersection(pages)
            self._suspect -= unclean
            self._unclean += sorted(unclean)
        return pages

    def suspect(self, pages: list[int]) -> None:
        """Note that these pages may hold what is no number."""
        self._suspect.update(pages)

    def trust(self, pages: list[int]) -> None:
        """Note that these pages hold numbers: an answer that depends on all of them has been drawn."""
        if self._suspect:
            self._suspect.difference_update(pages)

    def unclean(self) -> list[int]:
        """The pages that were handed out since the last call and have to be cleaned before the next step."""
        pages, self._unclean = self._unclean, []
        return pages

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

    def spoil(self, pages: list[int]) -> None:
        """See that nobody takes over what these pages, held, idle or free, contain: it may be wrong."""
        self.suspect(pages)
        for page in pages:
            if self.cache.is_named(page):
                self.cache.forget(page)
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

    def _share(self, page: int) -> None:
        self._holders[page] += 1
        self.cache.reuse(page)
