"""What is the same of all mixers: a mixer's place and parts, and the states of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from longreach_patches.cache.states import StateStep
from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import MixerParts

P = TypeVar("P", bound=MixerParts)

MIXER = "longreach_mixer"  # on modules that are patched


@dataclass(frozen=True)
class Mixer(Generic[P]):
    """What one mixer computes over slots: its place among the layers with a state, its parts, and whose kernels."""

    index: int
    parts: P
    backend: str


def states_of(step: PagedStep) -> StateStep:
    """The states of a step's sequences.

    Raises:
        UnsupportedModelError: it has none.
    """
    if step.states is None:
        raise UnsupportedModelError("this model's layers keep states: give the PagedStep its `states`")
    return step.states
