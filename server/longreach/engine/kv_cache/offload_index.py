"""Which page of the KV cache has a copy in host memory. Digests and slots only; `offload_store` has the memory.

Pages that the prefix cache evicts are kept here, by the same digests, until their slot is needed for another. What is
kept here may also be on the device: contents with a digest never change, so that neither copy can be the wrong one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class PageMoves(NamedTuple):
    """What has to be done to pages before and beside a step, in this order; see `step_retry.StepRunner.move`.

    Attributes:
        evicted: pages that are about to be written to, each with the slot that its contents are kept in.
        unclean: pages that have to hold numbers from now on.
        restored: slots whose contents come back, each with its page. The step does not read that page.
        saved: pages that will soon be evicted, each with the slot that it is kept in. The step does not write to them.
    """

    evicted: list[tuple[int, int]]
    unclean: list[int]
    restored: list[tuple[int, int]]
    saved: list[tuple[int, int]]

    @property
    def copies(self) -> int:
        """Pages that are copied."""
        return len(self.evicted) + len(self.restored) + len(self.saved)


class HostPages:
    """`num_slots` places for pages in host memory; the one that was used longest ago is evicted first.

    Between two calls of `unpin` a slot is given one content at most, and one that is read keeps its own: the copies of
    one step can be made in any order within their kind.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the one used longest ago first
        self._pinned: set[int] = set()

    @property
    def num_used(self) -> int:
        """Slots that hold a page."""
        return len(self._slot_of)

    def __contains__(self, digest: bytes) -> bool:
        """Whether a page with this digest is here."""
        return digest in self._slot_of

    def save(self, digest: bytes) -> int | None:
        """The slot to copy a page with this digest to; None if it is here, or if this step uses all slots already."""
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return None
        if not self._free:
            oldest = next((key for key, slot in self._slot_of.items() if slot not in self._pinned), None)
            if oldest is None:
                return None
            self.remove(oldest)
        slot = self._free.pop()
        self._slot_of[digest] = slot
        self._pinned.add(slot)
        return slot

    def load(self, digest: bytes) -> int:
        """The slot to copy a page with this digest from; it must be here."""
        self._slot_of.move_to_end(digest)
        slot = self._slot_of[digest]
        self._pinned.add(slot)
        return slot

    def unpin(self) -> None:
        """The copies of a step are on their way: what is copied later is copied after them."""
        self._pinned.clear()

    def remove(self, digest: bytes) -> None:
        """See that nobody gets what is kept under this digest, if anything is."""
        if (slot := self._slot_of.pop(digest, None)) is not None:
            self._free.append(slot)

    def remove_slots(self, slots: set[int]) -> None:
        """See that nobody gets what is kept in these slots."""
        for digest in [digest for digest, slot in self._slot_of.items() if slot in slots]:
            self.remove(digest)

    def check(self) -> None:
        """Assert that every slot is free or holds the page of one digest."""
        used = list(self._slot_of.values())
        assert sorted(used + self._free) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert self._pinned <= set(used), "a slot is in use in this step and holds nothing"
