"""How a time grows with the prompt: the exponent of a power law, fitted on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class PowerLaw(NamedTuple):
    """`factor * x ** exponent`."""

    factor: float
    exponent: float

    def at(self, x: float) -> float:
        """Its value at x."""
        return self.factor * x**self.exponent


def power_law(xs: Sequence[float], ys: Sequence[float]) -> PowerLaw | None:
    """The least-squares line through (log x, log y); None with fewer than two different x.

    An exponent of 1 is time in proportion to the prompt, 2 is attention alone; between them lie the lengths at which
    both count. All values are positive.
    """
    logs = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True)]
    if len({x for x, _ in logs}) < 2:
        return None
    middle_x = math.fsum(x for x, _ in logs) / len(logs)
    middle_y = math.fsum(y for _, y in logs) / len(logs)
    spread = math.fsum((x - middle_x) ** 2 for x, _ in logs)
    exponent = math.fsum((x - middle_x) * (y - middle_y) for x, y in logs) / spread
    return PowerLaw(math.exp(middle_y - exponent * middle_x), exponent)
