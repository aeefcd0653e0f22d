"""What is the same of all mixers: a mixer's place and parts, and the states of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from longreach_patches.cache.states import StateStep
from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import MixerParts
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.mixers.exchange import HeadExchange

P = TypeVar("P", bound=MixerParts)

MIXER = "longreach_mixer"  # on modules that are patched


@dataclass(frozen=True)
class Mixer(Generic[P]):
    """What one mixer computes over slots: its place among the layers with a state, its parts, and whose kernels; of
    several ranks, which one this is."""

    index: int
    parts: P
    backend: str
    layout: RankLayout = SINGLE

    def exchange(self, step: PagedStep) -> HeadExchange | None:
        """How this rank comes to its part of what all context ranks have; None if there is one."""
        if self.layout.context_size == 1:
            return None
        return HeadExchange(self.layout, self.layout.token_sizes(len(step.slots)))


def states_of(step: PagedStep) -> StateStep:
    """The states of a step's sequences.

    Raises:
        UnsupportedModelError: it has none.
    """
    if step.states is None:
        raise UnsupportedModelError("this model's layers keep states: give the PagedStep its `states`")
    return step.states
