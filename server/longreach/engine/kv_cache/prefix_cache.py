"""Pages whose contents are known by a digest, so that prompts which begin alike share them.

A page's digest is the SHA-256 of the digest of the page before it, and of its own tokens. The chain starts from
everything else that the keys and values depend on (model, revision, types, attention policy, rotary table) and from
the caller's salt. So equal digests mean equal contents, and nobody learns of another tenant's prompts by timing a
guess.

A cached page that no request holds is *idle*: it can be shared again, or evicted when its memory is needed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice

# The part of all pages that pages with a second use may fill before the oldest of them lose their protection.
_PROTECTED_SHARE = 1 / 2
# The part of all pages that one request's unused pages may leave in good standing; the rest go first.
_REQUEST_SHARE = 1 / 4
# The part of all pages that are evicted last since their prompts are pinned.
_PINNED_SHARE = 1 / 2


class PageHasher:
    """Makes the digests of pages. `namespace` is what all contents depend on, beside a request's own.

    With `answers_apart` it counts, too, where the prompt ends, for a page that holds tokens behind that: the same
    tokens give other bits in a prompt than in an answer.
    """

    def __init__(self, page_size: int, *namespace: str, answers_apart: bool = False) -> None:
        self._page_size = page_size
        self._namespace = (*namespace, str(page_size))
        self._answers_apart = answers_apart

    @property
    def namespace(self) -> list[str]:
        """What all contents depend on, as it was given."""
        return [*self._namespace[:-1]]

    def extend(
        self,
        digests: list[bytes],
        tokens: Sequence[int],
        salt: str,
        contents: str = "",
        prompt_tokens: int | None = None,
    ) -> None:
        """Append the digests of those full pages of `tokens` that `digests` does not have yet.

        `salt` is the tenant's, `contents` as `rope_choice.contents_key` says, `prompt_tokens` how many of the tokens,
        or of more of them, are the prompt's; None: all.
        """
        first, last = len(digests), len(tokens) // self._page_size
        if first >= last:
            return
        previous = digests[-1] if digests else self._root(salt, contents)
        new = memoryview(array("i", tokens[first * self._page_size : last * self._page_size])).cast("B")
        size = len(new) // (last - first)
        for start in range(0, len(new), size):
            digest = hashlib.sha256(previous)
            digest.update(new[start : start + size])
            end = (len(digests) + 1) * self._page_size
            if self._answers_apart and prompt_tokens is not None and end > prompt_tokens:
                digest.update(prompt_tokens.to_bytes(8, "big"))
            previous = digest.digest()
            digests.append(previous)

    def _root(self, *own: str) -> bytes:
        # Each part behind its length: no two sequences of parts run together into the same bytes.
        parts = [part.encode("utf-8", "surrogatepass") for part in (*self._namespace, *own)]
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


class PrefixCache:
    """Which page holds which digest, and in which order idle pages are given up.

    Idle pages stand in five queues, given up first to last:

    - *passed*: of a window that has gone on, before no border that somebody is likely to return to.
    - *probation*: nobody has used them a second time. Of one request's pages only a quarter of the cache enters at the
      young end; what is beyond goes to the old end, so that one giant prompt does not push out everybody else's.
    - *protected*: somebody shared them at least once. They fill at most half of the cache (segmented LRU,
      Karedla et al. 1994).
    - *retained*: of a request that was cancelled, until a moment given then, so that its retry goes on where it was.
    - *pinned*: of a pinned prompt. They fill at most half of the cache; beyond that, those used longest ago are put
      on probation.

    Within a queue the oldest go first and of one request the last pages before the first: a page is of no use without
    those before it.
    """

    def __init__(self, num_pages: int) -> None:
        self._protected_limit = int(num_pages * _PROTECTED_SHARE)
        self._request_limit = max(1, int(num_pages * _REQUEST_SHARE))
        self._pinned_limit = int(num_pages * _PINNED_SHARE)
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._used: dict[int, int] = {}  # see `last_use`; for the tiers below, the queues are in order
        self._reused: set[int] = set()
        self._lasting: set[bytes] = set()  # digests of pinned prompts, here or not
        self._keep_until: dict[int, float] = {}
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._pinned: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Pages that could be evicted."""
        return sum(map(len, self._queues))

    def lookup(self, digest: bytes) -> int | None:
        """The page with these contents, held or idle."""
        return self._page_of.get(digest)

    def has_digest(self, digest: bytes) -> bool:
        """Whether there is a page with these contents, held or idle."""
        return digest in self._page_of

    def has(self, page: int) -> bool:
        """Whether the page may be shared by others, and so must not be written to."""
        return page in self._digest_of

    def insert(self, page: int, digest: bytes, used: int = 0) -> bool:
        """Record that a held page has these contents, and when it was `used`, see `last_use`; False, changing nothing,
        where another page has them already."""
        assert page not in self._digest_of, page
        if digest in self._page_of:
            return False
        self._page_of[digest], self._digest_of[page] = page, digest
        self._used[page] = used
        return True

    def used(self, page: int) -> int:
        """When a cached page was used, see `last_use`."""
        return self._used[page]

    def digest_of(self, page: int) -> bytes | None:
        """The digest of a cached page; None of another."""
        return self._digest_of.get(page)

    def touch(self, page: int) -> None:
        """A request shares the page."""
        self._reused.add(page)
        self._leave_queue(page)

    def free(self, pages: list[int]) -> None:
        """Cached pages, in the order of their sequence, become idle."""
        lasting = [page for page in pages if self._digest_of[page] in self._lasting] if self._lasting else []
        if lasting:
            pages = [page for page in pages if self._digest_of[page] not in self._lasting]
        fresh = [page for page in pages if page not in self._keep_until and page not in self._reused]
        for page in pages:
            self._leave_queues(page)
        for page in fresh[self._request_limit :]:
            self._probation[page] = None
            self._probation.move_to_end(page, last=False)
        for page in reversed(fresh[: self._request_limit]):
            self._probation[page] = None
        for page in reversed(pages):
            if page in self._keep_until:
                self._retained[page] = None
            elif page in self._reused:
                self._protect(page)
        for page in reversed(lasting):
            self._pin(page)

    def pass_by(self, page: int) -> None:
        """A cached page becomes idle that is given up before all others."""
        self._reused.discard(page)
        self._keep_until.pop(page, None)
        if self._digest_of[page] in self._lasting:
            self._pin(page)
        else:
            self._passed[page] = None

    def is_passed(self, page: int) -> bool:
        """Whether an idle page is given up before all others."""
        return page in self._passed

    def retain(self, pages: list[int], until: float) -> None:
        """Keep these held pages longest once they are idle, up to the time `until`; those that are cached, that is."""
        for page in pages:
            if page in self._digest_of:
                self._keep_until[page] = until

    def expire(self, now: float) -> None:
        """End the retention of pages whose time has come: used once, they are given up before anything else."""
        expired = []
        while self._retained and self._keep_until[page := next(iter(self._retained))] <= now:
            del self._retained[page], self._keep_until[page]
            expired.append(page)
        for page in reversed([page for page in expired if page not in self._reused]):
            self._probation[page] = None
            self._probation.move_to_end(page, last=False)
        for page in [page for page in expired if page in self._reused]:
            self._protect(page)

    def next_evicted(self, count: int) -> list[tuple[int, bytes]]:
        """The idle pages that are evicted next, the next one first, at most `count`, with their digests."""
        pages = islice(chain(*self._queues), count)
        return [(page, self._digest_of[page]) for page in pages]

    def use_names(self, names: Iterable[tuple[bytes, int]]) -> None:
        """As `pinned_prompts.Tier.use_names`."""
        for name, used in names:
            if (page := self._page_of.get(name)) is not None:
                self._used[page] = used

    def pin_names(self, names: Sequence[bytes]) -> None:
        """As `pinned_prompts.Tier.pin_names`."""
        self._lasting.update(names)
        for page in self._idle_of(names):
            self._pin(page)

    def unpin_names(self, names: Sequence[bytes]) -> None:
        """As `pinned_prompts.Tier.unpin_names`; what has been used once is given up before anything else."""
        self._lasting.difference_update(names)
        pages = [page for page in self._idle_of(names) if page in self._pinned]
        for page in reversed(pages):
            del self._pinned[page]
            self._probation[page] = None
            self._probation.move_to_end(page, last=False)
        for page in [page for page in pages if page in self._reused]:
            del self._probation[page]
            self._protect(page)

    def remove(self, page: int) -> None:
        """Forget the digest of a page, held or idle; nobody will share it any more."""
        if (digest := self._digest_of.pop(page, None)) is not None:
            del self._page_of[digest], self._used[page]
        self._reused.discard(page)
        self._leave_queue(page)

    def check(self, idle: set[int]) -> None:
        """Assert that the queues hold exactly the pages `idle`, each once, and that digests and pages agree."""
        queued = list(chain(*self._queues))
        assert len(queued) == len(set(queued)), "an idle page stands in two queues"
        assert set(queued) == idle, f"queued {set(queued) - idle} are not idle; idle {idle - set(queued)} are lost"
        assert idle <= set(self._digest_of), "an idle page is not cached"
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of
        assert self._used.keys() == self._digest_of.keys()
        assert len(self._protected) <= self._protected_limit
        assert len(self._pinned) <= self._pinned_limit
        assert {self._digest_of[page] for page in self._pinned} <= self._lasting, "a page is pinned by nobody"
        assert set(self._protected) <= self._reused <= set(self._digest_of)
        assert set(self._retained) <= set(self._keep_until) <= set(self._digest_of)

    @property
    def _queues(self) -> tuple[OrderedDict[int, None], ...]:
        return self._passed, self._probation, self._protected, self._retained, self._pinned

    def _idle_of(self, names: Sequence[bytes]) -> list[int]:
        """The idle pages among those that are known by these."""
        pages = [self._page_of[name] for name in names if name in self._page_of]
        return [page for page in pages if any(page in queue for queue in self._queues)]

    def _pin(self, page: int) -> None:
        self._leave_queue(page)
        self._pinned[page] = None
        if len(self._pinned) > self._pinned_limit:
            oldest, _ = self._pinned.popitem(last=False)
            self._reused.discard(oldest)
            self._probation[oldest] = None

    def _protect(self, page: int) -> None:
        self._protected[page] = None
        if len(self._protected) > self._protected_limit:
            oldest, _ = self._protected.popitem(last=False)
            self._reused.discard(oldest)
            self._probation[oldest] = None

    def _leave_queue(self, page: int) -> None:
        self._keep_until.pop(page, None)
        self._leave_queues(page)

    def _leave_queues(self, page: int) -> None:
        for queue in self._queues:
            queue.pop(page, None)
