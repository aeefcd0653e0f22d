"""That a request waits for what is brought back for it."""

from __future__ import annotations

from typing import NamedTuple


class Awaited(NamedTuple):
    """Since when a request waits, and how many of its tokens had come from host memory and from disk before."""

    since: float
    host: int
    disk: int
