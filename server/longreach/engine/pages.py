"""Who owns which page of the KV cache. Ids only; the tensors behind them live in `longreach_patches.pages`."""

from __future__ import annotations


class PagePool:
    """A fixed number of pages, each free or owned by one request.

    `reserve` promises pages without naming them, so that a request which has been let in can always grow to its end;
    `take` names them when they are needed.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack: the page freed last is handed out first, while its memory may still be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._promised = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody owns, promised ones included."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that nobody owns and nobody has been promised."""
        return len(self._free) - self._promised

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence fill."""
        return -(-num_tokens // self.page_size)

    def reserve(self, count: int) -> bool:
        """Promise `count` pages, or change nothing and return False when there are too few."""
        if count > self.num_available:
            return False
        self._promised += count
        return True

    def take(self, count: int) -> list[int]:
        """Hand out `count` of the promised pages."""
        assert 0 <= count <= self._promised <= len(self._free), (count, self._promised, len(self._free))
        self._promised -= count
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int], promised: int) -> None:
        """Return a request's pages, and what it was promised but never took."""
        assert 0 <= promised <= self._promised, (promised, self._promised)
        self._promised -= promised
        self._free.extend(reversed(pages))

    def check(self, owned: list[list[int]], promised: list[int]) -> None:
        """Assert that the pages `owned` by each request and the free ones are exactly all pages, each once."""
        pages = [page for request in owned for page in request]
        assert sorted(pages + self._free) == list(range(self.num_pages)), "a page is lost or owned twice"
        assert sum(promised) == self._promised, f"promised {self._promised}, requests hold {sum(promised)}"
        assert self._promised <= len(self._free), "more pages are promised than are free"
