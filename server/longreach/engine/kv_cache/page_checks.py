"""What holds of requests and their pages after each step. Tests call it; a server does not."""

from __future__ import annotations

from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.requests.page_hold import DROPPED
from longreach.engine.requests.request import Request


def check_pages(pool: PagePool, groups: PageGroups, requests: list[Request]) -> None:
    """Assert that these are all who hold pages, and that nobody writes to a page that others may read."""
    windowed, everything = groups.windowed, tuple(range(len(groups.windows)))
    backed = [page for request in requests for page in request.hold.held(windowed)] if windowed else []
    held = [r.hold.held(everything) + [page for _, page in r.hold.ahead.values()] for r in requests]
    pool.check(held, [r.hold.reserved for r in requests], backed)
    for request in requests:
        hold = request.hold
        assert len(hold.pages) * pool.page_size >= request.computed, request.id
        assert hold.promised <= pool.pages_for(request.max_length), request.id
        for group, table in enumerate(hold.tables):
            first = hold.first[group]
            assert len(table) == len(hold.pages), f"{request.id} has tables of several lengths"
            assert table[:first] == [DROPPED] * first, f"{request.id} has dropped other pages than it says"
            assert DROPPED not in table[first:], f"{request.id} has dropped a page that it may need"
            assert first <= groups.first(group, request.computed // pool.page_size), f"{request.id} lacks a page"
            promise = groups.promise(group, hold.promised, first, hold.answering)
            assert len(table) - first + hold.owned(group) >= promise, f"{request.id} lacks a promised page"
            for page in table[request.computed // pool.page_size :]:
                assert pool.holders(page) == 1, f"{request.id} writes to page {page}, which others read"
                assert not pool.cache.has(page), f"{request.id} writes to page {page}, which is cached"
