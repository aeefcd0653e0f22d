"""Who holds which slot for a recurrent state. Ids only; the tensors behind them live in `longreach_patches.cache`.

A state cannot be cut: what a sequence has read up to a position is one value, which the next token replaces. To go back
to an earlier position one needs a copy that was left there. A copy is a slot that its sequence no longer writes to. It
is known by the digest of the page that ends at its position, and by how many pages there are up to it.

An idle copy, which no request starts from, can be started from again, or evicted when its slot is needed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

# The part of all slots that copies with a second use may fill before the oldest of them lose their protection.
_PROTECTED_SHARE = 1 / 2
# Requests that start from a copy before it is protected. The next turn of a conversation is one, and then the copy that
# the turn leaves is the one to keep. A document that several ask about has more.
_USES = 2


class FoundCopy(NamedTuple):
    """A copy of a state: its `slot`, and its position in pages, `depth`."""

    slot: int
    depth: int


@dataclass
class _Copy:
    digest: bytes
    depth: int
    pins: int = 0
    uses: int = 0
    keep_until: float | None = None


@dataclass
class _Queues:
    """Idle copies in the order in which they are given up: used at most once, used more often, kept for a while."""

    probation: OrderedDict[int, None] = field(default_factory=OrderedDict)
    protected: OrderedDict[int, None] = field(default_factory=OrderedDict)
    retained: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __iter__(self):
        return chain(self.probation, self.protected, self.retained)

    def __len__(self) -> int:
        return len(self.probation) + len(self.protected) + len(self.retained)

    def leave(self, slot: int) -> None:
        for queue in (self.probation, self.protected, self.retained):
            queue.pop(slot, None)


class StatePool:
    """`num_slots` slots: each is held by one request, a copy, or free.

    `reserve` promises slots without saying which; `allocate` says which, and evicts an idle copy when none is free.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._reserved = 0
        self._held: set[int] = set()
        self._copies: dict[int, _Copy] = {}
        self._slot_of: dict[bytes, int] = {}
        self._at_depth: Counter[int] = Counter()
        self._depths: list[int] = []  # at which there are copies, in order
        self._idle = _Queues()
        self._protected_limit = int(num_slots * _PROTECTED_SHARE)

    @property
    def num_available(self) -> int:
        """Slots that nobody holds (idle copies can be evicted) and nobody has reserved."""
        return len(self._free) + len(self._idle) - self._reserved

    @property
    def num_free(self) -> int:
        """Slots that hold nothing, reserved ones included."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Copies that no request starts from."""
        return len(self._idle)

    def is_idle(self, slot: int) -> bool:
        """Whether the slot is a copy that no request starts from."""
        return slot in self._copies and not self._copies[slot].pins

    def reserve(self, count: int) -> bool:
        """Promise `count` slots, or change nothing and return False."""
        if count > self.num_available:
            return False
        self._reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Take back a promise."""
        assert 0 <= count <= self._reserved, (count, self._reserved)
        self._reserved -= count

    def allocate(self) -> int:
        """The id of one of the reserved slots; what it contains means nothing."""
        assert self._reserved, "nothing was reserved"
        self._reserved -= 1
        if not self._free:
            self._forget(next(iter(self._idle)))
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Take back a held slot."""
        self._held.remove(slot)
        self._free.append(slot)

    def keep(self, slot: int, digest: bytes, depth: int) -> bool:
        """Make a held slot an idle copy with this digest; where there is one already it is freed instead: False."""
        if (there := self._slot_of.get(digest)) is not None:
            self.free(slot)
            if self.is_idle(there):
                self._queue(there)  # as young as this one would be
            return False
        self._held.remove(slot)
        self._copies[slot] = _Copy(digest, depth)
        self._slot_of[digest] = slot
        self._at_depth[depth] += 1
        if self._at_depth[depth] == 1:
            insort(self._depths, depth)
        self._queue(slot)
        return True

    def longest(self, digests: Sequence[bytes], above: int, most: int) -> FoundCopy | None:
        """The copy of the longest beginning of `digests`, of more than `above` pages and at most `most`."""
        for place in range(bisect_right(self._depths, min(most, len(digests))) - 1, -1, -1):
            depth = self._depths[place]
            if depth <= above:
                break
            if (slot := self._slot_of.get(digests[depth - 1])) is not None:
                return FoundCopy(slot, depth)
        return None

    def lookup(self, digest: bytes) -> int | None:
        """The slot of the copy with this digest."""
        return self._slot_of.get(digest)

    def pin(self, slot: int, *, counts: bool = True) -> None:
        """A request starts from a copy: it is not evicted until `unpin`. An idle one takes an available slot.

        It does not count as a use where the request is the one that has left the copy.
        """
        copy = self._copies[slot]
        if not copy.pins:
            assert self.num_available > 0, "reserved slots would be lost"
            self._idle.leave(slot)
        copy.pins += 1
        if counts:
            copy.uses += 1
            copy.keep_until = None

    def unpin(self, slot: int) -> None:
        """A request that was to start from a copy has done so, or will not. The copy may be forgotten already."""
        copy = self._copies[slot]
        copy.pins -= 1
        if not copy.pins:
            if copy.digest in self._slot_of and self._slot_of[copy.digest] == slot:
                self._queue(slot)
            else:  # it was removed meanwhile
                del self._copies[slot]
                self._free.append(slot)

    def retain(self, digest: bytes, until: float) -> None:
        """Evict the copy with this digest after all others, until a time; nothing where there is none."""
        if (slot := self._slot_of.get(digest)) is not None:
            self._copies[slot].keep_until = until
            if self.is_idle(slot):
                self._queue(slot)

    def expire(self, now: float) -> None:
        """End the retention of copies whose time has come; never used, they are given up before all others."""
        for slot in [s for s in self._idle.retained if (self._copies[s].keep_until or 0.0) <= now]:
            self._copies[slot].keep_until = None
            self._queue(slot)
            if not self._copies[slot].uses:
                self._idle.probation.move_to_end(slot, last=False)

    def remove(self, digest: bytes) -> None:
        """See that nobody starts from the copy with this digest any more; who has pinned it goes on."""
        if (slot := self._slot_of.get(digest)) is None:
            return
        if self._copies[slot].pins:
            self._unname(slot)
        else:
            self._forget(slot)

    def drop_unused(self, digest: bytes) -> None:
        """Free an idle copy that nobody has started from: a later one of the same answer stands in for it."""
        slot = self._slot_of.get(digest)
        if slot is not None and self.is_idle(slot) and not self._copies[slot].uses:
            self._forget(slot)

    def check(self, held: Sequence[int], pinned: Sequence[int], reserved: int) -> None:
        """Assert that `held` are all held slots, `pinned` all starts from copies, and that nothing is lost."""
        assert len(held) == len(set(held)), "two requests write to one slot"
        assert set(held) == self._held, "a held slot is not known"
        slots = [*self._free, *self._held, *self._copies]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or used twice"
        pins = Counter(pinned)
        assert all(copy.pins == pins[slot] for slot, copy in self._copies.items()), "a pin is not known"
        assert set(pins) <= set(self._copies), "a pinned copy is not there"
        idle = list(self._idle)
        assert len(idle) == len(set(idle)), "a copy stands in two queues"
        assert set(idle) == {slot for slot in self._copies if not pins[slot]}, "an idle copy is in no queue"
        assert all(self._copies[slot].digest == digest for digest, slot in self._slot_of.items())
        assert set(idle) <= set(self._slot_of.values()), "an idle copy cannot be found"
        depths = Counter(self._copies[slot].depth for slot in self._slot_of.values())
        assert depths == +self._at_depth, "depths and copies do not agree"
        assert self._depths == sorted(depths), "depths and copies do not agree"
        assert len(self._idle.protected) <= self._protected_limit
        assert reserved == self._reserved, f"reserved {self._reserved}, by requests {reserved}"
        assert self.num_available >= 0, "more slots are reserved than could be allocated"

    def _queue(self, slot: int) -> None:
        """Put an idle copy at the young end of its queue."""
        copy, idle = self._copies[slot], self._idle
        idle.leave(slot)
        if copy.keep_until is not None:
            idle.retained[slot] = None
        elif copy.uses >= _USES and self._protected_limit:
            idle.protected[slot] = None
            if len(idle.protected) > self._protected_limit:
                oldest, _ = idle.protected.popitem(last=False)
                self._copies[oldest].uses = 0
                idle.probation[oldest] = None
        else:
            idle.probation[slot] = None

    def _forget(self, slot: int) -> None:
        self._unname(slot)
        self._idle.leave(slot)
        del self._copies[slot]
        self._free.append(slot)

    def _unname(self, slot: int) -> None:
        copy = self._copies[slot]
        del self._slot_of[copy.digest]
        self._at_depth[copy.depth] -= 1
        if not self._at_depth[copy.depth]:
            del self._at_depth[copy.depth]
            self._depths.remove(copy.depth)
