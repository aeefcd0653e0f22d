"""How long requests wait for what comes back from host memory and from disk: learned from those that have waited."""

from __future__ import annotations

# What the last request that has waited weighs.
_WEIGHT = 0.3


class RestoreTime:
    """Seconds for each token that comes back from host memory and from disk; the latter pass through the former."""

    def __init__(self) -> None:
        self._host: float | None = None
        self._disk: float | None = None

    def observe(self, seconds: float, host: int, disk: int) -> None:
        """A request has waited so long for tokens from host memory and from disk."""
        if disk:
            rest = max(0.0, seconds - host * (self._host or 0.0))
            self._disk = _mean(self._disk, rest / disk)
        elif host:
            self._host = _mean(self._host, seconds / host)

    def seconds(self, host: int, disk: int) -> float | None:
        """Predicted time until so many tokens have come; None if nothing is known of some."""
        if (host and self._host is None) or (disk and self._disk is None):
            return None
        return host * (self._host or 0.0) + disk * (self._disk or 0.0)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (new - before)
