"""In which order entries of a tier are evicted: those used longest ago first, and pinned ones after all others.

The order knows keys, weights, and when each key was used, a number as in `last_use`. Who pins what is said in
`pinned_prompts`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_SPARE = 1 << 62  # what spare keys count as older by


class _Queue(Generic[K]):
    """Keys by when they were used. The heap may have a key under an earlier number than its own, and keys that are
    gone: a key that is used again costs nothing until its turn comes."""

    def __init__(self) -> None:
        self.used: dict[K, int] = {}
        self._heap: list[tuple[int, K]] = []

    def put(self, key: K, used: int) -> None:
        before = self.used.get(key)
        self.used[key] = used
        if before is None or used < before:
            heapq.heappush(self._heap, (used, key))
            if len(self._heap) > 2 * len(self.used) + 64:
                self._heap = [(used, key) for key, used in self.used.items()]
                heapq.heapify(self._heap)

    def first(self, stays: Callable[[K], bool]) -> K | None:
        """The key used longest ago of those that may go."""
        heap, kept = self._heap, []
        found = None
        while heap and found is None:
            at, key = heap[0]
            used = self.used.get(key)
            if used is None or used < at:
                heapq.heappop(heap)
            elif used > at:
                heapq.heapreplace(heap, (used, key))
            elif stays(key):
                kept.append(heapq.heappop(heap))
            else:
                found = key
        for entry in kept:
            heapq.heappush(heap, entry)
        return found

    def in_order(self) -> list[K]:
        return sorted(self.used, key=lambda key: (self.used[key], key))  # pyright: ignore[reportArgumentType]


class EvictionOrder(Generic[K]):
    """Keys in the order of eviction. Pinned ones go last, as long as they weigh at most `most_pinned` together; beyond
    that those used longest ago stand among the others. None: there is no such bound. Spare ones go first."""

    def __init__(self, most_pinned: int | None = None) -> None:
        self._most_pinned = most_pinned
        self._pinned_weight = 0
        self._weights: dict[K, int] = {}
        self._others: _Queue[K] = _Queue()
        self._pinned: _Queue[K] = _Queue()
        self._newest = self._unpinned = 0

    def __contains__(self, key: K) -> bool:
        """Whether the key has a place in the order."""
        return key in self._weights

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._weights)

    def __iter__(self) -> Iterator[K]:
        """The keys, the one that is evicted next first; it takes long."""
        return chain(self._others.in_order(), self._pinned.in_order())

    def used(self, key: K) -> int:
        """When a key that is here was used."""
        used = self._queue_of(key).used[key]
        return used if used > -_SPARE // 2 else used + _SPARE

    def first(self, stays: Callable[[K], bool]) -> K | None:
        """The key that is evicted next, of those that do not stay; None if all stay."""
        found = self._others.first(stays)
        return self._pinned.first(stays) if found is None else found

    def use(self, key: K, weight: int = 1, *, used: int | None = None, pinned: bool = False) -> None:
        """A key is new, or used; None: after all that are here. Who was used later already stays so."""
        if key in self._others.used and not pinned:  # most often
            used = self._newest + 1 if used is None else used
            self._others.put(key, max(used, self._others.used[key]))
        else:
            before = self.used(key) if key in self else None
            used = self._newest + 1 if used is None else used
            used = used if before is None else max(used, before)
            self.remove(key)
            self._weights[key] = weight
            (self._pinned if pinned else self._others).put(key, used)
            self._pinned_weight += weight if pinned else 0
        self._newest = max(self._newest, used)
        while self._most_pinned is not None and self._pinned_weight > self._most_pinned:
            oldest = self._pinned.first(_nobody)
            assert oldest is not None
            self._others.put(oldest, self._unpin(oldest))

    def unpin(self, key: K) -> None:
        """A pinned key is one of the others, and evicted before them until it is used."""
        if key in self._pinned.used:
            self._unpin(key)
            self._unpinned -= 1
            self._others.put(key, self._unpinned)

    def spare(self, key: K) -> None:
        """A key that is here goes before others, of those that are pinned, or that are not, until it is used."""
        self._queue_of(key).put(key, self.used(key) - _SPARE)

    def remove(self, key: K) -> None:
        """Forget a key, if it is here."""
        if key in self._pinned.used:
            self._unpin(key)
        self._others.used.pop(key, None)
        self._weights.pop(key, None)

    def check(self) -> None:
        """Assert that no key stands here twice, and that the weight of pinned ones is right and within its bound."""
        assert not self._others.used.keys() & self._pinned.used.keys(), "a key stands in the order twice"
        assert self._others.used.keys() | self._pinned.used.keys() == self._weights.keys(), "a key has no place"
        assert self._pinned_weight == sum(self._weights[key] for key in self._pinned.used), "the weight is wrong"
        assert self._most_pinned is None or self._pinned_weight <= self._most_pinned, "too much is pinned"
        assert self.first(_nobody) == next(iter(self), None), "another key is evicted than stands first"

    def _queue_of(self, key: K) -> _Queue[K]:
        return self._pinned if key in self._pinned.used else self._others

    def _unpin(self, key: K) -> int:
        self._pinned_weight -= self._weights[key]
        return self._pinned.used.pop(key)


def _nobody(_key: object) -> bool:
    return False
