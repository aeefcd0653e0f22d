"""Which pages of a request are written to disk.

Of layers that see everything all pages are. Of windows those are that somebody may return to, see `borders`: a prompt
of 128K tokens needs a sixth of the pages of its windows of 1,024 tokens.

Most of these are known when they are filled. The others are known when the request ends: those that the end of its
answer needs, for the conversation's next turn, and those that it has shared before a border at which others turned off.
"""

from __future__ import annotations

from collections.abc import Iterator

from longreach.engine.kv_cache.borders import is_worth_keeping, key
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.last_use import page_used
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.requests.request import Request


def want_filled(pool: PagePool, groups: PageGroups, request: Request, group: int, page: int) -> None:
    """Have a page written that has just been filled, unless nobody is likely to return to it."""
    if (disk := pool.disk) is not None and (group in groups.full or is_worth_keeping(groups, request, group, page)):
        hold = request.hold
        disk.want(key(hold.digests[page], group), hold.tables[group][page], used=page_used(hold.use, page))


def want_left(pool: PagePool, groups: PageGroups, request: Request) -> None:
    """Have written what a request that ends leaves behind of windows, see above."""
    if (disk := pool.disk) is None:
        return
    for place, page, name in (*_held(groups, request), *request.hold.kept):
        if pool.cache.digest_of(page) == name:
            disk.want(name, page, used=page_used(request.hold.use, place))


def _held(groups: PageGroups, request: Request) -> Iterator[tuple[int, int, bytes]]:
    """The pages that window groups hold and that have a digest: the page of tokens, the id and the key."""
    hold = request.hold
    for group in groups.windowed:
        table = hold.tables[group]
        for place in range(hold.first[group], min(len(table), len(hold.digests))):
            yield place, table[place], key(hold.digests[place], group)
