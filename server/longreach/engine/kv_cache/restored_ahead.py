"""Pages that come back from the host before all that is needed at a border can: a step brings back so many and no more.

A prefix of a model with windows or states is usable at some borders only, and these may be far apart. The pages on the
way to the next one are brought back step by step. Until the request stands there nobody else finds them, so that its
reservation stays what it is, and they can be put back.
"""

from __future__ import annotations

from collections import Counter

from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_finder import PrefixFinder
from longreach.engine.requests.request import Request


class RestoredAhead:
    """What requests hold `PageHold.ahead` of pages of a `pool`."""

    def __init__(self, pool: PagePool, groups: PageGroups, finder: PrefixFinder) -> None:
        self._pool = pool
        self._groups = groups
        self._finder = finder
        self._coming: Counter[bytes] = Counter()  # the keys of all of them

    def come_for_others(self, request: Request, names: list[bytes]) -> bool:
        """Whether a request waits for what others bring back. One that has begun to bring pages back waits for nobody,
        so that no two wait for each other."""
        return not request.hold.ahead and any(self._coming[name] for name in names)

    def bring(self, request: Request, start: int, border: int, count: int) -> list[bytes]:
        """Have up to `count` pages come back that the request needs between two borders, in place of reserved ones;
        their keys. The host has them pinned."""
        hold, pool = request.hold, self._pool
        brought: list[tuple[int, bytes]] = []
        for group in range(len(self._groups.windows)):
            first = max(start, self._groups.first(group, border))
            for name in self._finder.keys(hold, (group,), first, border):
                if len(brought) == count or not hold.reserves[group]:
                    break
                if name not in hold.ahead and not pool.cache.has_digest(name):
                    brought.append((group, name))
                    hold.reserves[group] -= 1
        if brought:
            pages = pool.restore([name for _, name in brought], findable=False)
            hold.ahead |= {name: (group, page) for (group, name), page in zip(brought, pages, strict=True)}
            self._coming.update(name for _, name in brought)
        return [name for _, name in brought]

    def take(self, request: Request, name: bytes) -> int | None:
        """The page with this key, which others find from now on; None if it is not ahead."""
        if name not in request.hold.ahead:
            return None
        _, page = request.hold.ahead.pop(name)
        self._forget(name)
        self._pool.cache.insert(page, name, request.hold.use)
        return page

    def put_back(self, request: Request, *, known_only: bool = False) -> None:
        """Put a request's pages back, with `known_only` those that others have brought back or computed meanwhile."""
        hold = request.hold
        for name, (group, page) in list(hold.ahead.items()):
            if not known_only or self._pool.cache.has_digest(name):
                del hold.ahead[name]
                self._forget(name)
                self._pool.put_back(page)
                hold.reserves[group] += 1

    def check(self, requests: list[Request]) -> None:
        """Assert that these are all who hold any."""
        assert self._coming == Counter(name for request in requests for name in request.hold.ahead)

    def _forget(self, name: bytes) -> None:
        self._coming[name] -= 1
        if not self._coming[name]:
            del self._coming[name]
