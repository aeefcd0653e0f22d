"""How many page ids the groups of a model's layers take: plain arithmetic on tokens, windows and pages.

A group of layers takes one id of the pool for each page of tokens that it keeps. A *full* group keeps all pages of a
sequence. A *window* group keeps those that its next query can see, and those that steps in flight fill: pages behind
are dropped once the step is settled that leaves them behind.

A *border* is the end of a page. At a border of n pages a window group needs the pages from `first(group, n)` to n.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

# Tokens of a prompt that a request can always compute in one step; more, where pages are free.
_CHUNK_TOKENS = 2048
# Tokens of an answer that steps in flight may compute before pages behind the window are dropped.
_ANSWER_TOKENS = 4


@dataclass(frozen=True)
class PageGroups:
    """The groups of a model's layers.

    Attributes:
        page_size: tokens in a page.
        windows: of each group the tokens that a query sees, its own included; None for a full group.
        step_tokens: the most tokens of a step.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    step_tokens: int = _CHUNK_TOKENS

    @cached_property
    def full(self) -> tuple[int, ...]:
        """The groups that keep all pages."""
        return tuple(group for group, window in enumerate(self.windows) if window is None)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """The groups that drop pages."""
        return tuple(group for group, window in enumerate(self.windows) if window is not None)

    @cached_property
    def behind(self) -> tuple[int, ...]:
        """Of each group the pages before a border that its next query sees; 0 for a full group, which drops none."""
        return tuple(0 if window is None else -(-(window - 1) // self.page_size) for window in self.windows)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence fill."""
        return -(-num_tokens // self.page_size)

    def first(self, group: int, border: int) -> int:
        """The first page that a group needs for queries behind a border of so many pages."""
        return 0 if self.windows[group] is None else max(0, border - self.behind[group])

    def most(self, group: int, answering: bool) -> int:
        """The pages that a window group may always hold at once, of a sequence that is read or, `answering`, written.

        From the border before the first token that is not settled: the window's pages, and those of the tokens behind.
        """
        tokens = _ANSWER_TOKENS if answering else min(self.step_tokens, _CHUNK_TOKENS)
        return self.behind[group] + self.pages_for(self.page_size - 1 + tokens)

    def promise(self, group: int, pages: int, first: int, answering: bool) -> int:
        """The pages from `first` on that a group is promised for a sequence of `pages` pages, held ones included."""
        left = pages - first
        return left if self.windows[group] is None else min(left, self.most(group, answering))

    def ids_for(self, length: int) -> int:
        """The ids that a sequence of `length` tokens is promised when it begins: what it can always have at once."""
        pages = self.pages_for(length)
        return sum(self.promise(group, pages, 0, False) for group in range(len(self.windows)))

    def longest(self, num_ids: int, limit: int = 1 << 40) -> int:
        """The longest sequence that `num_ids` ids are enough for, in tokens; `limit` where it is any."""
        pages = bisect_right(range(self.pages_for(limit) + 1), num_ids, key=lambda n: self.ids_for(n * self.page_size))
        return min(limit, (pages - 1) * self.page_size)
