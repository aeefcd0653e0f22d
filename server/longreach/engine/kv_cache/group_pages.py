"""What the groups of a request's layers hold of the pages, lack of them, and leave behind. It acts on `PageHold`.

A full group keeps its pages to the end. A window's pages are *dropped* when no later query sees them. It then needs
less than it has reserved, and what it has beyond its promise is given back.
"""

from __future__ import annotations

from longreach.engine.kv_cache.borders import is_worth_keeping
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.requests.page_hold import DROPPED, PageHold
from longreach.engine.requests.request import Request


class GroupPages:
    """The pages of a `pool` that requests hold for each of some `groups` of layers."""

    def __init__(self, pool: PagePool, groups: PageGroups) -> None:
        self._pool = pool
        self._size = pool.page_size
        self._groups = groups
        self._all = tuple(range(len(groups.windows)))
        self._has_windows = bool(groups.windowed)

    def missing(self, hold: PageHold, pages: int, border: int | None) -> list[int]:
        """Of each group the pages that it lacks for a sequence of `pages` pages: of a request that stands at a border
        and holds what it needs there, or, with None, holds what it does."""
        groups, missing = self._groups, []
        for group in self._all:
            if border is None:
                first, answering = hold.first[group], hold.answering
                held = len(hold.pages) - first + hold.owned(group)
            else:
                first, answering = groups.first(group, border), False
                held = border - first
            missing.append(max(0, groups.promise(group, pages, first, answering) - held))
        return missing

    def longest_chunk(self, request: Request) -> int:
        """How many tokens a request can have computed in its next step: its windows' pages are dropped step by step.

        Some are always there, once no step in flight computes others of it. Of what is there half is left to the step
        after, so that two may be in flight.
        """
        hold = request.hold
        if not self._has_windows:
            return hold.promised * self._size
        windowed = self._groups.windowed
        pages = min(hold.reserves[group] for group in windowed) + self._pool.num_available // len(windowed)
        return len(hold.pages) * self._size - request.computed + (pages + 1) // 2 * self._size

    def drop(self, request: Request, position: int) -> None:
        """Take back the pages that no window sees from `position` on, before which all tokens are settled."""
        if not self._has_windows:
            return
        hold, border = request.hold, position // self._size
        answering = request.known - position <= 1 + request.redo
        if border > hold.settled or answering != hold.answering:
            hold.settled, hold.answering = border, answering
            self.drop_behind(request, border)
            self.trim(hold)

    def drop_behind(self, request: Request, border: int) -> None:
        """Drop what no window sees behind a border of so many pages."""
        hold, pool = request.hold, self._pool
        for group in self._groups.windowed:
            table, before = hold.tables[group], hold.first[group]
            after = min(self._groups.first(group, border), len(table))
            for place in range(before, after):
                page, table[place] = table[place], DROPPED
                if request.known <= request.prompt_tokens:
                    pool.mark_unclean([page])  # no answer has been drawn that depends on it
                worth = is_worth_keeping(self._groups, request, group, place)
                if worth and (digest := pool.cache.digest_of(page)) is not None:
                    hold.kept.append((place, page, digest))
                pool.drop(page, worth=worth)
                hold.reserves[group] += 1
            hold.first[group] = max(before, self._groups.first(group, border))

    def trim(self, hold: PageHold) -> None:
        """Take back what windows have reserved beyond their promise."""
        for group in self._groups.windowed:
            first = hold.first[group]
            promise = self._groups.promise(group, hold.promised, first, hold.answering)
            if (surplus := min(hold.reserves[group], len(hold.pages) - first + hold.owned(group) - promise)) > 0:
                self._pool.unreserve(surplus)
                hold.reserves[group] -= surplus
