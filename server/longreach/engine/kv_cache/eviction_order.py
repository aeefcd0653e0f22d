"""In which order entries of a tier are evicted: those used longest ago first, and pinned ones after all others.

The order knows keys and weights only. Who pins what is said in `pinned_prompts`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionOrder(Generic[K]):
    """Keys in the order of eviction. Pinned ones go last, as long as they weigh at most `most_pinned` together; beyond
    that those used longest ago stand among the others, as young as they can be. None: there is no such bound."""

    def __init__(self, most_pinned: int | None = None) -> None:
        self._most_pinned = most_pinned
        self._pinned_weight = 0
        self._others: OrderedDict[K, int] = OrderedDict()  # weights, by key
        self._pinned: OrderedDict[K, int] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        """Whether the key has a place in the order."""
        return key in self._others or key in self._pinned

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._others) + len(self._pinned)

    def __iter__(self) -> Iterator[K]:
        """The keys, the one that is evicted next first."""
        return chain(self._others, self._pinned)

    def use(self, key: K, weight: int = 1, *, pinned: bool = False) -> None:
        """A key is used, or new: of those that are pinned, or of those that are not, it is evicted last."""
        self.remove(key)
        if not pinned:
            self._others[key] = weight
            return
        self._pinned[key] = weight
        self._pinned_weight += weight
        while self._most_pinned is not None and self._pinned_weight > self._most_pinned:
            oldest, weight = self._pinned.popitem(last=False)
            self._pinned_weight -= weight
            self._others[oldest] = weight

    def unpin(self, key: K) -> None:
        """A pinned key is one of the others, and evicted before them until it is used."""
        if key in self._pinned:
            weight = self._pinned.pop(key)
            self._pinned_weight -= weight
            self._others[key] = weight
            self._others.move_to_end(key, last=False)

    def remove(self, key: K) -> None:
        """Forget a key, if it is here."""
        self._others.pop(key, None)
        self._pinned_weight -= self._pinned.pop(key, 0)

    def check(self) -> None:
        """Assert that no key stands here twice, and that the weight of pinned ones is right and within its bound."""
        assert not self._others.keys() & self._pinned.keys(), "a key stands in the order twice"
        assert self._pinned_weight == sum(self._pinned.values()), "the weight of pinned keys is wrong"
        assert self._most_pinned is None or self._pinned_weight <= self._most_pinned, "too much is pinned"
