"""Who holds which slot for a recurrent state. Ids only; the tensors behind them live in `longreach_patches.cache`.

A state cannot be cut: what a sequence has read up to a position is one value, which the next token replaces. To go back
to an earlier position one needs a copy that was left there. A copy is a slot that its sequence no longer writes to. It
is known by the digest of the page that ends at its position, and by how many pages there are up to it.

An idle copy, which no request starts from, can be started from again, or evicted when its slot is needed. With a
`HostTier` what is evicted is kept in host memory, and can be restored.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from longreach.engine.kv_cache.borders import STATE_GROUP, key
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.state_depths import StateDepths

# The part of all slots that copies with a second use may fill before the oldest of them lose their protection.
_PROTECTED_SHARE = 1 / 2
# Requests that start from a copy before it is protected. The next turn of a conversation is one, and then the copy that
# the turn leaves is the one to keep. A document that several ask about has more.
_USES = 2
# The part of all slots whose copies are evicted last since their prompts are pinned.
_PINNED_SHARE = 1 / 2
# Requests of one conversation that start from one copy: repeated turns, and those that do not fill the next page.
_ONE_CONVERSATION = 8
# Copies that are saved to host memory beside one step, before they are evicted. Each is as large as many pages.
_MOST_AHEAD = 2
# The slot of a copy that is in host memory only.
AWAY = -1


class FoundCopy(NamedTuple):
    """A copy of a state: its `slot`, AWAY where host memory alone has it, and its position in pages, `depth`."""

    slot: int
    depth: int


@dataclass
class _Copy:
    digest: bytes
    depth: int
    used: int = 0  # see `last_use`; for the tiers below, the queues are in order
    pins: int = 0
    uses: int = 0
    keep_until: float | None = None
    is_spare: bool = False  # another one stands in for it


@dataclass
class _Queues:
    """Idle copies in the order in which they are given up: spare, used at most once, used more often, kept for a while,
    of a pinned prompt."""

    spare: OrderedDict[int, None] = field(default_factory=OrderedDict)
    probation: OrderedDict[int, None] = field(default_factory=OrderedDict)
    protected: OrderedDict[int, None] = field(default_factory=OrderedDict)
    retained: OrderedDict[int, None] = field(default_factory=OrderedDict)
    pinned: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __iter__(self):
        return chain(*self._all)

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def leave(self, slot: int) -> None:
        for queue in self._all:
            queue.pop(slot, None)

    @property
    def _all(self) -> tuple[OrderedDict[int, None], ...]:
        return self.spare, self.probation, self.protected, self.retained, self.pinned


class StatePool:
    """`num_slots` slots: each is held by one request, a copy, or free.

    `reserve` promises slots without saying which; `allocate` says which, and evicts an idle copy when none is free.
    """

    def __init__(self, num_slots: int, host: HostTier | None = None) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._reserved = 0
        self._held: set[int] = set()
        self._copies: dict[int, _Copy] = {}
        self._slot_of: dict[bytes, int] = {}
        self._depths = StateDepths()
        self._idle = _Queues()
        self._protected_limit = int(num_slots * _PROTECTED_SHARE)
        self._pinned_limit = int(num_slots * _PINNED_SHARE)
        self._lasting: set[bytes] = set()  # keys of pinned prompts, here or not
        self.host = host
        # Copies that a step in flight fills: others may start from them after it. Should it fail, there must be none.
        self.unfinished: set[bytes] = set()

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

    def is_shared(self, slot: int) -> bool:
        """Whether more requests have started from a copy than one conversation's turns are likely to."""
        return slot in self._copies and self._copies[slot].uses > _ONE_CONVERSATION

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
            self._evict(next(iter(self._idle)))
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Take back a held slot."""
        self._held.remove(slot)
        self._free.append(slot)

    def keep(self, slot: int, digest: bytes, depth: int, used: int = 0) -> bool:
        """Make a held slot an idle copy with this digest, which was `used` then, see `last_use`; where there is one
        already it is freed instead: False."""
        if (there := self._slot_of.get(digest)) is not None:
            self.free(slot)
            self._copies[there].is_spare = False  # the prompt has come twice
            if self.is_idle(there):
                self._queue(there)  # as young as this one would be
            return False
        self._held.remove(slot)
        self._copies[slot] = _Copy(digest, depth, used)
        self._name(slot)
        self._queue(slot)
        if self.host is not None and self.host.disk is not None:
            self.host.disk.want(key(digest, STATE_GROUP), slot, depth, used)
        return True

    def restore(self, digest: bytes, depth: int) -> int:
        """A reserved slot for the copy that the host has under this digest, pinned for who starts from it; nobody else
        finds it yet."""
        assert self.host is not None
        name = key(digest, STATE_GROUP)
        self.host.pin([name])  # the allocated slot may be kept in host memory itself
        slot = self.allocate()
        self._held.remove(slot)
        self._copies[slot] = _Copy(digest, depth, self.host.index.used(name), pins=1, uses=1)
        self.host.restore(name, slot, partial(self._arrive, slot), is_state=True)
        return slot

    def save_ahead(self) -> None:
        """Have the copies that are evicted next kept in host memory beside this step, as many as reserved slots will
        take soon, and one more."""
        if self.host is None:
            return
        count = self._reserved + 1 - len(self._free)
        for slot in islice(self._idle, max(0, min(count, _MOST_AHEAD))):
            copy = self._copies[slot]
            if copy.digest not in self.unfinished and slot not in self._idle.spare:
                self.host.save_ahead(key(copy.digest, STATE_GROUP), slot, copy.depth, copy.used)

    def longest(self, digests: Sequence[bytes], above: int, most: int, *, on_device: bool = False) -> FoundCopy | None:
        """The copy of the longest beginning of `digests`, of more than `above` pages and at most `most`.

        One that only the host has counts, unless it has to be `on_device`.
        """
        depths = self._depths.between(above, min(most, len(digests)))
        found = next((FoundCopy(slot, depth) for depth in depths if (slot := self._slot_at(digests, depth)) >= 0), None)
        if self.host is None or on_device:
            return found
        longer = self.host.index.longest_state(digests, above if found is None else found.depth, most)
        return found if longer is None else FoundCopy(AWAY, longer)

    def is_there(self, name: bytes, slot: int) -> bool | None:
        """Whether a slot is the copy with this key; None if a step in flight fills it."""
        copy = self._copies.get(slot)
        if copy is None or key(copy.digest, STATE_GROUP) != name:
            return False
        return None if copy.digest in self.unfinished else True

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
            copy.is_spare = False

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

    def use_names(self, names: Iterable[tuple[bytes, int]]) -> None:
        """As `pinned_prompts.Tier.use_names`."""
        for name, used in names:
            if name[-1] == STATE_GROUP and (slot := self._slot_of.get(name[:-1])) is not None:
                self._copies[slot].used = used

    def pin_names(self, names: Sequence[bytes]) -> None:
        """As `pinned_prompts.Tier.pin_names`."""
        self._lasting.update(names)
        self._queue_anew(names)

    def unpin_names(self, names: Sequence[bytes]) -> None:
        """As `pinned_prompts.Tier.unpin_names`."""
        self._lasting.difference_update(names)
        for slot in reversed(self._queue_anew(names)):
            if slot in self._idle.probation and not self._copies[slot].uses:
                self._idle.probation.move_to_end(slot, last=False)

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
            if slot in self._idle.probation and not self._copies[slot].uses:
                self._idle.probation.move_to_end(slot, last=False)

    def remove(self, digest: bytes) -> None:
        """See that nobody starts from the copy with this digest any more; who has pinned it goes on."""
        if self.host is not None:
            self.host.remove([key(digest, STATE_GROUP)])
        if (slot := self._slot_of.get(digest)) is None:
            return
        if self._copies[slot].pins:
            self._unname(slot)
        else:
            self._forget(slot)

    def drop_unused(self, digest: bytes) -> None:
        """Free an idle copy that nobody has started from: a later one of the same answer stands in for it.

        In host memory, too, where this one would take the room of many pages.
        """
        slot = self._slot_of.get(digest)
        if slot is None or (self.is_idle(slot) and not self._copies[slot].uses):
            self.remove(digest)

    def spare(self, digest: bytes) -> None:
        """Give up a copy that nobody has started from before all others, and keep it nowhere else: a later one stands
        in for it. Nothing where there is none."""
        if (slot := self._slot_of.get(digest)) is not None:
            self._copies[slot].is_spare = True
            if self.is_idle(slot):
                self._queue(slot)

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
        self._depths.check(self._copies[slot].depth for slot in self._slot_of.values())
        assert len(self._idle.protected) <= self._protected_limit
        assert len(self._idle.pinned) <= self._pinned_limit
        assert reserved == self._reserved, f"reserved {self._reserved}, by requests {reserved}"
        assert self.num_available >= 0, "more slots are reserved than could be allocated"

    def _queue_anew(self, names: Sequence[bytes]) -> list[int]:
        """Queue the idle copies with these keys; their slots."""
        digests = [name[:-1] for name in names if name == key(name[:-1], STATE_GROUP)]
        slots = [self._slot_of[digest] for digest in digests if digest in self._slot_of]
        idle = [slot for slot in slots if self.is_idle(slot)]
        for slot in idle:
            self._queue(slot)
        return idle

    def _queue(self, slot: int) -> None:
        """Put an idle copy at the young end of its queue."""
        copy, idle = self._copies[slot], self._idle
        idle.leave(slot)
        if key(copy.digest, STATE_GROUP) in self._lasting:
            idle.pinned[slot] = None
            if len(idle.pinned) > self._pinned_limit:
                oldest, _ = idle.pinned.popitem(last=False)
                idle.probation[oldest] = None
        elif copy.keep_until is not None:
            idle.retained[slot] = None
        elif copy.is_spare and not copy.uses:
            idle.spare[slot] = None
        elif copy.uses >= _USES and self._protected_limit:
            idle.protected[slot] = None
            if len(idle.protected) > self._protected_limit:
                oldest, _ = idle.protected.popitem(last=False)
                self._copies[oldest].uses = 0
                idle.probation[oldest] = None
        else:
            idle.probation[slot] = None

    def _evict(self, slot: int) -> None:
        copy = self._copies[slot]
        is_kept = copy.digest not in self.unfinished and slot not in self._idle.spare
        if self.host is not None and is_kept:
            self.host.evict(key(copy.digest, STATE_GROUP), slot, copy.depth, copy.used)
        self._forget(slot)

    def _arrive(self, slot: int) -> None:
        """A copy is on its way back to its slot: others may start from it, unless one like it was left meanwhile."""
        if self._copies[slot].digest not in self._slot_of:
            self._name(slot)

    def _slot_at(self, digests: Sequence[bytes], depth: int) -> int:
        return self._slot_of.get(digests[depth - 1], AWAY)

    def _forget(self, slot: int) -> None:
        self._unname(slot)
        self._idle.leave(slot)
        del self._copies[slot]
        self._free.append(slot)

    def _name(self, slot: int) -> None:
        copy = self._copies[slot]
        self._slot_of[copy.digest] = slot
        self._depths.add(copy.depth)

    def _unname(self, slot: int) -> None:
        copy = self._copies[slot]
        del self._slot_of[copy.digest]
        self._depths.remove(copy.depth)
