"""When prompts are used: all tiers are told of each use of all that a request could take from them.

A request uses its prefix wherever that is. So what is answered from the device stays on disk, too, and what is read
from disk for a request does not displace what it needs of host memory.

Host memory is not told of what the device has: it keeps what the device has given up, and what is in both is given up
first there. So both together hold more.
"""

from __future__ import annotations

from longreach.engine.kv_cache.borders import STATE_GROUP, key
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.last_use import UseClock, page_used, state_used
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.state_allocator import StateAllocator
from longreach.engine.requests.request import Request


class PromptUses:
    """Tells the tiers of a `pool` and of `states`, where there is any below the device, of uses."""

    def __init__(self, pool: PagePool, groups: PageGroups, states: StateAllocator | None) -> None:
        self._pool = pool
        self._groups = range(len(groups.windows))
        self._states = states
        self._clock = UseClock()

    def begin(self, request: Request) -> None:
        """A request begins to use what is cached of its tokens, unless it has done so."""
        if not request.hold.use:
            self.end(request)

    def end(self, request: Request) -> None:
        """A request has used what is cached of its tokens until now."""
        hold, pool = request.hold, self._pool
        if pool.host is None:
            return
        hold.use = self._clock.next()
        pages = [
            (key(digest, group), page_used(hold.use, page))
            for page, digest in enumerate(hold.digests)
            for group in self._groups
        ]
        pool.cache.use_names(pages)
        away = [(name, used) for name, used in pages if not pool.cache.has_digest(name)]
        states: list[tuple[bytes, int]] = []
        if self._states is not None:
            for depth, digest in enumerate(hold.digests, 1):
                states.append((key(digest, STATE_GROUP), state_used(hold.use, depth)))
                if not self._states.is_on_device(digest):
                    away.append(states[-1])
            self._states.tier.use_names(states)
        pool.host.index.use_names(away)
        if pool.host.disk is not None:
            pool.host.disk.use_names(pages + states)
