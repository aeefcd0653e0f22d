"""How long a step takes: a small linear model, learned from the steps that have run. Plain numbers, no clock.

    seconds = per_step * steps + per_token * tokens + per_pair * pairs + per_key * keys

A step has a fixed cost (launches, reading the weights), one for each token (projections), one for each pair of a query
and a key that it attends to (prefill attention), and one for each cached key that is read (decode attention). The model
is linear, so that one measurement may cover several steps that ran back to back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from longreach.policies.visible import Visible

# What the four kinds of work cost in relation to each other before anything is measured: a step's fixed cost is that
# of 2**8 tokens, 2**23 pairs or 2**17 keys, about as in an 8B model on one GPU; and the first of them, in seconds.
_UNITS = np.array([1.0, 2.0**-8, 2.0**-23, 2.0**-17])
_ASSUMED = 0.01
# How firmly each coefficient is held to the assumed relations, relative to what was measured of its kind of work: what
# the measurements cannot tell apart stays where it was assumed, at the speed that was measured of all.
_RIDGE = 1e-5
# What a measurement weighs after the next one of its size class; about the last fifty count.
_FORGET = 0.98
# How cautious late steps make, and the part of that which one step in time takes away.
_MOST_CAUTION = 2.0
_CALMING = 0.05


@dataclass(frozen=True, slots=True)
class Work:
    """What one or more steps compute; see the module's formula for the four counts."""

    steps: int = 0
    tokens: int = 0
    pairs: int = 0
    keys: int = 0

    @classmethod
    def of_chunk(cls, start: int, length: int, visible: Visible | None = None) -> Work:
        """Tokens `start` to `start + length` of one sequence, each of which attends to itself and all before it, or to
        as much of that as `visible` says."""
        end = start + length
        if visible is not None:
            return cls(0, length, visible.pairs(start, end), length + visible.keys(start))
        return cls(0, length, length * (start + end + 1) // 2, end)

    @classmethod
    def of_step(cls, chunks: Iterable[tuple[int, int, Visible | None]]) -> Work:
        """One step of chunks, each given as (start, length, visible)."""
        tokens = pairs = keys = 0
        for start, length, visible in chunks:  # in plain numbers: this runs once a step for every request
            tokens += length
            if visible is not None:
                pairs += visible.pairs(start, start + length)
                keys += length + visible.keys(start)
                continue
            pairs += length * (2 * start + length + 1) // 2
            keys += start + length
        return cls(1, tokens, pairs, keys)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.steps + other.steps, self.tokens + other.tokens, self.pairs + other.pairs, self.keys + other.keys
        )


class StepCost(msgspec.Struct, frozen=True):
    """The four coefficients, in seconds, none negative. The defaults are what is assumed before any measurement."""

    per_step: float = _ASSUMED * float(_UNITS[0])
    per_token: float = _ASSUMED * float(_UNITS[1])
    per_pair: float = _ASSUMED * float(_UNITS[2])
    per_key: float = _ASSUMED * float(_UNITS[3])

    def seconds(self, work: Work) -> float:
        """Predicted duration of `work`."""
        return (
            self.per_step * work.steps
            + self.per_token * work.tokens
            + self.per_pair * work.pairs
            + self.per_key * work.keys
        )

    def longest_chunk(self, start: int, limit: int, seconds: float, visible: Visible | None = None) -> int:
        """The most tokens from `start` on, at most `limit`, that add at most `seconds` to a step; 0 if none fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(Work.of_chunk(start, middle, visible)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def prefill_seconds(self, start: int, end: int, chunk: int, visible: Visible | None = None) -> float:
        """Predicted time to compute tokens `start` to `end` of one prompt in steps of `chunk` tokens, alone."""
        whole = Work.of_chunk(start, end - start, visible)
        steps = -(-(end - start) // chunk)
        # Every step reads the keys so far: `steps` times about the mean of first and last.
        keys = steps * (start + end) // 2
        if visible is not None:
            keys = steps * (visible.keys(start) + visible.keys(end)) // 2
        return self.seconds(Work(steps, whole.tokens, whole.pairs, keys))


class StepTime:
    """Fits a `StepCost` to measurements, by least squares on relative errors with the coefficients kept non-negative.

    An error relative to the measurement cannot exceed 1 where a step took unexpectedly long, so that a kernel's first
    compilation does not distort the fit. Measurements fade within their size class (powers of two of tokens a step):
    an hour of decodes makes nothing of what is known about prefill forgotten. The result depends on the sequence of
    measurements alone. Before the first one the cost is `assumed`.
    """

    def __init__(self, assumed: StepCost | None = None) -> None:
        self._moments: dict[int, np.ndarray] = {}  # by size class: sum of outer products of (features, target)
        self._cost: StepCost | None = StepCost() if assumed is None else assumed
        self.caution = 1.0

    def judge(self, work: Work, seconds: float) -> None:
        """Note how a step that was cut to a length of time came out, before it is learned from.

        `caution` is by how much steps of late took longer than predicted, at most 2: it grows at once and goes slowly.
        A linear model is off where kernels fill the GPU badly, and a run of chunks meets such places one after another.
        """
        late = min(max(seconds / self.cost.seconds(work), 1.0), _MOST_CAUTION)
        self.caution = late if late > self.caution else self.caution + _CALMING * (late - self.caution)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn that `work` took `seconds`; what took no time or computed nothing teaches nothing."""
        if seconds <= 0 or not work.steps or not work.tokens:
            return
        features = np.array([work.steps, work.tokens, work.pairs, work.keys]) * _UNITS / seconds
        row = np.append(features, 1.0)
        size = (work.tokens // work.steps).bit_length()
        self._moments[size] = _FORGET * self._moments.get(size, 0.0) + np.outer(row, row)
        self._cost = None

    @property
    def cost(self) -> StepCost:
        """The coefficients that fit best."""
        if self._cost is None:
            self._cost = self._fit()
        return self._cost

    def _fit(self) -> StepCost:
        moments = sum(self._moments.values(), np.zeros((5, 5)))
        gram, target = moments[:4, :4], moments[:4, 4]
        # The one coefficient that fits best if all kinds of work relate as assumed: how fast this machine is.
        even = target.sum() / gram.sum()
        ridge = _RIDGE * gram.diagonal() + 1e-30
        gram = gram + np.diag(ridge)
        target = target + ridge * even
        free = np.ones(4, bool)
        solution = np.zeros(4)
        while (
            free.any()
        ):  # at most four times: a coefficient that comes out negative is 0, and the rest is fitted again
            solution[:] = 0.0
            solution[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            if (solution >= 0).all():
                break
            free[solution.argmin()] = False
        return StepCost(*(float(value) for value in np.maximum(solution, 0.0) * _UNITS))
