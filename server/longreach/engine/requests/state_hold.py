"""What a request holds of the slots for recurrent states. Plain data; `kv_cache.state_allocator` alone writes to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple


class StateSlots(NamedTuple):
    """The slot that a chunk's sequence starts from, -1 for zeros, and the other one that it leaves its state in."""

    read: int
    write: int


class StateAt(NamedTuple):
    """A state of a sequence: the position that it has read up to, its slot (-1: zeros), and whether that is a copy,
    which others may start from, so that nobody writes to it."""

    at: int = 0
    slot: int = -1
    shared: bool = False

    @property
    def is_own(self) -> bool:
        """Whether the request alone holds the slot."""
        return self.slot >= 0 and not self.shared


# Nothing has been read: zeros.
NO_STATE = StateAt()


@dataclass(eq=False)
class StateHold:
    """Slots of one request.

    Attributes:
        unit: tokens of which a border is a multiple; 0 for a model without states, whose other fields stay as they are.
        state: what its next step starts from.
        next: the slot that the step which has been planned writes to; -1 where none is.
        before: what the step in flight has started from, while it is not known whether its drafts stand.
        kept: states at borders that will be copies once the steps that made them are settled.
        reserved: slots that it may still have allocated, without being refused.
        borders: positions in its prompt at which copies are wanted and chunks end.
        spacing: tokens from one copy to the next between these borders.
        last_kept: the position of the last copy that it has left or started from.
        rolling: the digest of the newest copy in its answer.
        first_turn: the border near the end of a short prompt of which nothing was cached; 0 if there is none.
        spare: the digest of the copy there, which is of little use once there is one in the answer.
    """

    unit: int = 0
    state: StateAt = NO_STATE
    next: int = -1
    before: StateAt | None = None
    kept: list[StateAt] = field(default_factory=list)
    reserved: int = 0
    borders: set[int] = field(default_factory=set)
    spacing: int = 0
    last_kept: int = 0
    rolling: bytes | None = None
    first_turn: int = 0
    spare: bytes | None = None

    @property
    def own_slots(self) -> list[int]:
        """The slots that it alone holds, for steps; those that are `kept` are beside them."""
        states = [state for state in (self.state, self.before) if state is not None and state.is_own]
        return [state.slot for state in states] + ([] if self.next < 0 else [self.next])

    @property
    def pinned(self) -> list[int]:
        """The copies that it starts from."""
        return [state.slot for state in (self.state, self.before) if state is not None and state.shared]

    def before_border(self, length: int) -> float:
        """How many tokens behind `length` a step of an answer may read, so that it does not skip a copy that is due."""
        return -length % self.unit if self.spacing else math.inf

    def cut(self, start: int, length: int, last: int) -> int:
        """The length of a chunk from `start` on of at most `length` tokens, of a sequence of `last`.

        It ends at a border where it can, and where a copy is due. Elsewhere it ends at a multiple of `unit` if that
        costs little: whoever is cancelled there comes back to it.
        """
        end = start + length
        if ahead := [border for border in self.borders if start < border <= end]:
            return min(ahead) - start
        if end == last:
            return length
        rounded = end // self.unit * self.unit - start
        is_due = end // self.unit * self.unit - self.last_kept >= self.spacing
        return rounded if rounded > 0 and (is_due or 8 * rounded >= 7 * length) else length
