"""How much of its prompt a query sees under an attention policy, in three numbers, for predictions of time."""

from __future__ import annotations

from typing import NamedTuple


class Visible(NamedTuple):
    """How many keys a query sees, about: `base` and `share` of those at or before it, or all of them where they are
    fewer or the query stands below position `whole`."""

    base: float
    share: float
    whole: int = 0

    def keys(self, end: int) -> int:
        """Keys that the query before position `end` sees."""
        return end if end <= self.whole else min(end, round(self.base + self.share * end))

    def pairs(self, start: int, end: int) -> int:
        """Pairs of the queries `start` to `end`."""
        turn = end if self.share >= 1 else max(int(self.base / (1 - self.share)), self.whole)
        turn = min(max(turn, start), end)
        grown = (turn - start) * (start + turn + 1) / 2
        return round(grown + (end - turn) * (self.base + self.share * (turn + end + 1) / 2))

    def beside_dense(self, share: float) -> Visible | None:
        """The mean over layers, `share` of which see everything; None where that is all of them."""
        whole_share = share + (1 - share) * self.share
        return None if whole_share >= 1 else Visible((1 - share) * self.base, whole_share, self.whole)


ALL = Visible(0.0, 1.0)
