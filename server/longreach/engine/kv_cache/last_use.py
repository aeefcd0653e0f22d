"""When an entry of the cache was last used, as one number by which host memory and the disk order what they evict.

A prefix is of no use without its first page. So of one use the end of the prompt counts as older than its beginning:

    used = time of the use - 2 * page - (1 of a state)

The time is in nanoseconds, and the file of an entry has `used` as its time of modification. So the order outlives the
process. Two uses are so far apart that the pages of one stand together, unless a prompt has over 131,072 pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_APART = 1 << 18  # nanoseconds


class UseClock:
    """Gives each use its time, in nanoseconds since 1970: later ones are larger, whatever the system's clock does."""

    def __init__(self, now: Callable[[], int] = time.time_ns) -> None:
        self._now = now
        self._last = 0

    def next(self) -> int:
        """The time of a use that begins now."""
        self._last = max(self._last + _APART, self._now())
        return self._last


def page_used(use: int, page: int) -> int:
    """When a page of a prompt, counted from 0, was last used, in a use that began at `use`."""
    return use - 2 * page


def state_used(use: int, depth: int) -> int:
    """When the copy of a state behind `depth` pages was last used: before the page that ends there, which longer
    prompts may still need."""
    return page_used(use, depth - 1) - 1
