"""A bound on bytes that many callers hold together, and a reserve that one of them alone cannot use up."""

from __future__ import annotations

# When the bound is reached, callers may still add who then hold at most the first part of it, up to the second beyond.
_OWN_SHARE = 1 / 8
_RESERVE = 1 / 4


class SharedBytes:
    """Counts bytes by caller; `bound` None for no bound.

    Attributes:
        total: what all hold.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._of_callers: dict[str, int] = {}
        self.total = 0

    def fits(self, caller: str, size: int) -> bool:
        """Whether a caller may hold so much more."""
        if self._bound is None or self.total + size <= self._bound:
            return True
        own = self._of_callers.get(caller, 0) + size
        return own <= self._bound * _OWN_SHARE and self.total + size <= self._bound * (1 + _RESERVE)

    def add(self, caller: str, size: int) -> None:
        """A caller holds so much more."""
        self._change(caller, size)

    def remove(self, caller: str, size: int) -> None:
        """A caller holds so much less."""
        self._change(caller, -size)

    def _change(self, caller: str, size: int) -> None:
        self.total += size
        held = self._of_callers.pop(caller, 0) + size
        if held:  # so that callers who have gone are forgotten
            self._of_callers[caller] = held
