"""How much of attention was computed: pairs of a query and a key, of those that causality allows. Plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from longreach.engine.requests.step_plan import StepPlan
from longreach.policies.values import StepPolicy


class PairCount:
    """Pairs since the start, over all layers that attend; their ratio is the attention's density.

    `visible` has one entry for each of these layers: how many keys a query sees at most (a window and its sinks), None
    for all. `under` counts the pairs of queries `start` to `end` in all of them under a policy that is not dense.
    """

    def __init__(
        self,
        visible: Iterable[int | None] = (None,),
        under: Callable[[StepPolicy, int, int], float] | None = None,
    ) -> None:
        self._layers = Counter(visible)
        self._under = under
        self.causal = 0
        self.computed = 0.0  # heads of one layer may differ: it counts their mean

    def add(self, plan: StepPlan) -> None:
        """Count a step."""
        for chunk in plan.chunks:
            if chunk.policy.is_dynamic:
                continue  # `measured` when its prompt has been read
            causal = _pairs(chunk.start, chunk.end, None)
            self.causal += self._layers.total() * causal
            if self._under is not None and not chunk.policy.is_dense:
                self.computed += self._under(chunk.policy, chunk.start, chunk.end)
                continue
            for visible, layers in self._layers.items():
                self.computed += layers * (causal if visible is None else _pairs(chunk.start, chunk.end, visible))

    def measured(self, start: int, end: int, computed: float) -> None:
        """Count queries `start` to `end` of a dynamic policy, of which so many pairs were computed in all layers that
        attend."""
        self.causal += self._layers.total() * _pairs(start, end, None)
        self.computed += computed


def _pairs(start: int, end: int, visible: int | None) -> int:
    """The sum over queries `start` to `end` of the keys each sees: itself, all before it, at most `visible`."""
    turn = end if visible is None else min(max(visible, start), end)  # from here on a query sees `visible` keys
    grown = (turn - start) * (start + turn + 1) // 2
    return grown + (end - turn) * (visible or 0)
