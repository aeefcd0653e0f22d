"""What two settings answered of the same prompts, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def beside(right: Sequence[bool], dense: Sequence[bool]) -> dict[str, Any]:
    """Answers lost and gained against dense attention on the same prompts, and the probability of a difference as large
    in either direction if neither were better: McNemar's exact test."""
    lost = sum(d and not r for r, d in zip(right, dense, strict=True))
    gained = sum(r and not d for r, d in zip(right, dense, strict=True))
    return {"lost": lost, "gained": gained, "p": probability(lost, gained)}


def probability(lost: int, gained: int) -> float:
    """The probability of a difference as large in either direction if neither setting were better."""
    tail = sum(math.comb(lost + gained, i) for i in range(min(lost, gained) + 1)) / 2 ** (lost + gained)
    return min(1.0, 2 * tail)
