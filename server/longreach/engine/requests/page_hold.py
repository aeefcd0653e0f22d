"""What a request holds of the KV cache. Plain data, which `kv_cache.allocator` alone writes to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

# Stands in a table for a page that its group has dropped, or that was never read for it.
DROPPED = -1


@dataclass(eq=False)
class PageHold:
    """Pages of one request.

    Attributes:
        tables: of each group of layers the ids of the request's pages, in the order of its tokens, all of one length;
            DROPPED where a window group has dropped a page. A request that comes back after a preemption has new
            lists: whoever keeps a copy tells by their identity.
        first: of each group its first page that is not dropped.
        reserves: of each group the pages that it may still have allocated, without being refused.
        promised: pages of tokens that the request may grow to, without being refused.
        settled: the border, in pages, before which all is settled.
        answering: whether all tokens that were given are settled, so that chunks are short.
        kept: cached pages that windows have dropped and that are worth keeping: the page of tokens, the id, and what
            the cache knows it by.
        ahead: pages that have come back for a border which it does not stand at yet: by key the group and the id.
        turns: borders, in pages, that somebody has returned to: where the cache ended for this request.
        use: when it began to use what is cached, see `kv_cache.last_use`; 0 before.
        digests: of its full pages, as far as they have been asked for; none without a prefix cache.
        cached_tokens: how many of its prompt's tokens were in the prefix cache before it was first preempted.
        host_tokens: of these, how many had a page that was brought back from host memory, and not from disk.
        disk_tokens: how many had one that was read from disk.
        cached_until: the position up to which its tokens were computed or cached, when that was last looked up.
        chain_until: the same of full groups alone.
        not_launched: whether some pages are for a chunk that was planned and not launched: nobody computed them.
    """

    tables: list[list[int]] = field(default_factory=lambda: [[]])
    first: list[int] = field(default_factory=lambda: [0])
    reserves: list[int] = field(default_factory=lambda: [0])
    promised: int = 0
    settled: int = 0
    answering: bool = False
    kept: list[tuple[int, int, bytes]] = field(default_factory=list)
    ahead: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    turns: tuple[int, ...] = ()
    use: int = 0
    digests: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    cached_until: int = 0
    chain_until: int = 0
    not_launched: bool = False

    def clear(self, num_groups: int) -> None:
        """Hold nothing; the digests stay."""
        self.tables = [[] for _ in range(num_groups)]
        self.first = [0] * num_groups
        self.reserves = [0] * num_groups
        self.promised, self.settled, self.answering, self.turns = 0, 0, False, ()
        self.kept, self.ahead, self.use = [], {}, 0
        self.cached_until = self.chain_until = 0

    @property
    def pages(self) -> list[int]:
        """Ids of the first group's pages; of the only group's in a model whose layers are all of one kind."""
        return self.tables[0]

    @pages.setter
    def pages(self, pages: list[int]) -> None:
        self.tables[0] = pages

    @property
    def reserved(self) -> int:
        """The ids that all groups together may still have allocated."""
        return sum(self.reserves)

    @property
    def num_ids(self) -> int:
        """The ids that all groups together hold, have ahead, or may still have allocated."""
        held = sum(len(table) - first for table, first in zip(self.tables, self.first, strict=True))
        return held + len(self.ahead) + self.reserved

    def owned(self, group: int) -> int:
        """The ids that a group may still have, or has ahead."""
        return self.reserves[group] + sum(of == group for of, _ in self.ahead.values())

    def held(self, groups: tuple[int, ...]) -> list[int]:
        """The ids that these groups hold, group by group."""
        if len(groups) == 1:
            return self.tables[groups[0]][self.first[groups[0]] :]
        return [page for group in groups for page in self.tables[group][self.first[group] :]]

    def in_order(self, kept: list[tuple[int, int]]) -> list[int]:
        """The ids that all groups hold, in the order of the request's tokens, among others `kept` of some places."""
        if len(self.tables) == 1 and not kept:
            return self.tables[0][self.first[0] :]
        places = kept + [
            (place, table[place])
            for table, first in zip(self.tables, self.first, strict=True)
            for place in range(first, len(table))
        ]
        return [page for _, page in sorted(places, key=lambda found: found[0])]


def common_pages(mine: Sequence[bytes], others: Sequence[bytes], most: int = 1 << 40) -> int:
    """How many first pages two sequences of digests share, at most `most`.

    A digest depends on all pages before: those that are equal come first.
    """
    most = min(len(mine), len(others), most)
    if not most or mine[0] != others[0]:
        return 0
    return bisect_left(range(most), True, key=lambda page: mine[page] != others[page])


class Sought(Protocol):
    """Whoever looks for a cached prefix: a `request.Request`, or a question about one."""

    @property
    def hold(self) -> PageHold:
        """The digests of its pages."""
        ...

    @property
    def skippable(self) -> int:
        """How many of its first tokens need not be computed where they are cached."""
        ...
