"""At which borders there are copies of states, in pages: the longest beginning with one is found without trying all."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator


class StateDepths:
    """How many copies there are at each depth, the number of pages before their border."""

    def __init__(self) -> None:
        self._count: Counter[int] = Counter()
        self._depths: list[int] = []  # at which there are any, in order

    def add(self, depth: int) -> None:
        """There is one more."""
        self._count[depth] += 1
        if self._count[depth] == 1:
            insort(self._depths, depth)

    def remove(self, depth: int) -> None:
        """There is one less."""
        self._count[depth] -= 1
        if not self._count[depth]:
            del self._count[depth]
            self._depths.remove(depth)

    def between(self, above: int, most: int) -> Iterator[int]:
        """Those of more than `above` pages and at most `most`, the deepest first."""
        for place in range(bisect_right(self._depths, most) - 1, -1, -1):
            if self._depths[place] <= above:
                return
            yield self._depths[place]

    def check(self, depths: Iterable[int]) -> None:
        """Assert that these are all."""
        found = Counter(depths)
        assert found == self._count, "depths and copies do not agree"
        assert self._depths == sorted(found), "depths and copies do not agree"
