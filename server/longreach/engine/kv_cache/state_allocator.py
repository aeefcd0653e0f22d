"""The slots of requests for recurrent states: what `allocator.PageAllocator` does with pages, done with slots.

A step never writes to a slot that it reads. So a step that could not be launched can be launched again, drafts that do
not stand are forgotten with the slot that they were read into, and a copy is the slot that a sequence leaves behind at
a border. For that a running request has two slots. Copies are extra, and taken only where a slot can be had.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from longreach.engine.kv_cache.borders import STATE_GROUP, key
from longreach.engine.kv_cache.last_use import state_used
from longreach.engine.kv_cache.pinned_prompts import Tier
from longreach.engine.kv_cache.state_borders import BorderRule
from longreach.engine.kv_cache.state_pool import AWAY, FoundCopy, StatePool
from longreach.engine.requests.page_hold import Sought, common_pages
from longreach.engine.requests.request import Request
from longreach.engine.requests.state_hold import NO_STATE, StateAt, StateHold, StateSlots
from longreach.sizes import TILE

# What a running request needs: the slot that a step reads, and the one that it writes.
SLOTS_PER_REQUEST = 2


class StateUsage(NamedTuple):
    """Slots for states: all, those that hold nothing, and copies that no request starts from at the moment; and the
    copies that host memory has."""

    slots: int
    free: int
    copies: int
    host_copies: int = 0


class StateAllocator:
    """Slots of a `pool` for requests; `copies` says whether others may start from what one has left, by `rule`."""

    def __init__(self, pool: StatePool, page_size: int, *, copies: bool, rule: BorderRule | None = None) -> None:
        if pool.num_slots < SLOTS_PER_REQUEST + copies:
            raise ValueError(f"a request needs {SLOTS_PER_REQUEST} slots and one to start from, got {pool.num_slots}")
        self._pool = pool
        self._size = page_size
        self._copies = copies
        self._rule = BorderRule() if rule is None else rule
        self._running = self._answers = 0  # requests that hold slots, and those that have left a copy in their answer

    @property
    def tier(self) -> Tier:
        """What evicts copies."""
        return self._pool

    @property
    def usage(self) -> StateUsage:
        """How many slots there are, and how many are in use."""
        pool = self._pool
        host_copies = 0 if pool.host is None else pool.host.index.num_states
        return StateUsage(pool.num_slots, pool.num_free, pool.num_idle, host_copies)

    def add(self, request: Request) -> None:
        """Say at which positions of a new request's prompt copies are wanted."""
        hold = request.states
        # What a dynamic policy chooses for a tile of queries depends on where the tile begins.
        hold.unit = math.lcm(self._size, TILE) if request.needs_whole_tiles else self._size
        if self._copies:
            hold.borders = self._rule.borders(request.prompt_tokens, hold.unit)
            hold.spacing = self._rule.spacing(request.prompt_tokens, hold.unit)

    def add_border(self, request: Request, depth: int) -> None:
        """Want a copy, too, where a request's prompt parts from another one, after `depth` pages or a little before."""
        hold = request.states
        at = depth * self._size // hold.unit * hold.unit
        if not self._copies or at <= request.computed:
            return
        nearest = max((border for border in (hold.last_kept, *hold.borders) if border <= at), default=0)
        if self._rule.is_worth(at - nearest):
            hold.borders.add(at)

    def add_turn(self, request: Request, chain: int) -> None:
        """Want copies where the prompt of a request that has been let in parts from the `chain` pages that are cached,
        and near its end, however short it is, if it may be a conversation's turn; and none too near its start.

        A turn that starts where several have started has a beginning which many prompts share, and most of them end
        with one question.
        """
        hold = request.states
        start = hold.state
        hold.borders = {at for at in hold.borders if at <= start.at or self._rule.is_worth(at - start.at)}
        self.add_border(request, chain)
        if not self._copies or (chain and chain * self._size == start.at and self._pool.is_shared(start.slot)):
            return
        last = self._rule.last(request.prompt_tokens, hold.unit)
        if self._rule.is_worth(last - max(start.at, *hold.borders, 0)):
            hold.borders.add(last)
            if not chain:
                hold.first_turn = last

    def add_parting(self, new: Request, other: Request) -> None:
        """Want copies where a new request's prompt parts from another one's that is not read that far."""
        mine, others = new.hold.digests, other.hold.digests
        most = min(len(mine), len(others), new.skippable // self._size, other.skippable // self._size)
        if not self._copies or not most or mine[0] != others[0] or other.computed >= most * self._size:
            return
        depth = common_pages(mine, others, most)
        self.add_border(new, depth)
        self.add_border(other, depth)

    def can_reserve(self, start: FoundCopy | None) -> bool:
        """Whether `reserve` would do it."""
        extra = start is not None and self._pool.is_idle(start.slot)
        return SLOTS_PER_REQUEST + extra <= self._pool.num_available

    def reserve(self, request: Request, start: FoundCopy | None) -> bool:
        """Promise slots to a request that holds none, and have it start from a copy; or change nothing: False."""
        hold = request.states
        assert not hold.reserved, request.id
        assert not hold.own_slots, request.id
        if not self.can_reserve(start):
            return False
        assert self._pool.reserve(SLOTS_PER_REQUEST)
        hold.reserved = SLOTS_PER_REQUEST
        self._running += 1
        if start is not None:
            self._pin(hold, start)
        return True

    def longest(self, request: Sought, above: int, most: int, *, on_device: bool = False) -> FoundCopy | None:
        """The copy of a request's longest beginning of more than `above` pages and at most `most`; see `StatePool`."""
        return self._pool.longest(request.hold.digests, above, most, on_device=on_device)

    def is_there(self, name: bytes, slot: int) -> bool | None:
        """As `StatePool.is_there`."""
        return self._pool.is_there(name, slot)

    def is_on_device(self, digest: bytes) -> bool:
        """Whether the device has the copy with this digest."""
        return self._pool.lookup(digest) is not None

    def has(self, digest: bytes) -> bool:
        """Whether the device or the host has the copy with this digest."""
        host = self._pool.host
        return self._pool.lookup(digest) is not None or (host is not None and key(digest, STATE_GROUP) in host)

    def start_from(self, request: Request, start: FoundCopy) -> bool:
        """Have a running request go on from a copy further on; False, changing nothing, if no slot is left for that.

        One that is AWAY is restored: the request does not compute in the step beside which it comes.
        """
        pool, hold = self._pool, request.states
        if (start.slot == AWAY or pool.is_idle(start.slot)) and not pool.num_available:
            return False
        assert hold.before is None, request.id
        left = hold.state
        if start.slot == AWAY:
            assert pool.reserve(1)
            self._stand(hold, start._replace(slot=pool.restore(request.hold.digests[start.depth - 1], start.depth)))
        else:
            self._pin(hold, start)
        self._leave(hold, left)
        return True

    def save_ahead(self) -> None:
        """As `StatePool.save_ahead`."""
        self._pool.save_ahead()

    def begin(self, request: Request) -> StateSlots:
        """The slots of a request's chunk in the step that is being planned."""
        hold = request.states
        if hold.next < 0:
            assert hold.reserved, request.id
            hold.reserved -= 1
            hold.next = self._pool.allocate()
        return StateSlots(hold.state.slot, hold.next)

    def advance(self, request: Request, end: int, *, drafts: bool) -> None:
        """A step has been launched that reads the request up to `end`, `drafts` included."""
        hold = request.states
        assert hold.next >= 0, request.id
        assert hold.before is None, request.id
        left, hold.state, hold.next = hold.state, StateAt(end, hold.next), -1
        if drafts:
            hold.before = left
        elif self._is_wanted(request, left) and self._pool.reserve(1):
            hold.reserved += 1
            hold.kept.append(left)
        else:
            self._leave(hold, left)

    def settle_drafts(self, request: Request, end: int) -> int:
        """The drafts of a request's step in flight stand up to `end`; the position from which it goes on."""
        hold = request.states
        if (before := hold.before) is None:
            return end
        hold.before = None
        if hold.state.at == end:
            self._leave(hold, before)
        else:
            self._leave(hold, hold.state)
            hold.state = before
        return hold.state.at

    def commit(self, request: Request, end: int) -> bool:
        """Let others start from the states that a request has at borders up to `end`; whether there are new ones.

        The steps that made them are settled, and the digests up to there made.
        """
        hold = request.states
        found = len(hold.kept)
        self._commit_kept(request, end, in_flight=False)
        found -= len(hold.kept)
        state = hold.state
        if state.at <= end and hold.before is None and self._is_wanted(request, state) and self._pool.reserve(1):
            hold.reserved += 1
            digest = self._keep(request, state, in_flight=False)
            slot = self._pool.lookup(digest)
            assert slot is not None
            self._pool.pin(slot, counts=False)
            hold.state = StateAt(state.at, slot, shared=True)
            found += 1
        return bool(found)

    def leave(self, request: Request, end: int, *, in_flight: bool) -> None:
        """Keep where a request stands that is about to be freed, if that is a border up to `end`.

        A retry of it, or the next turn of its conversation, comes back to there. With `in_flight` a step may still be
        computing it, see `invalidate_unfinished`.
        """
        hold = request.states
        self._commit_kept(request, end, in_flight=in_flight)
        state = hold.state if hold.before is None else hold.before
        if not self._copies or not state.is_own or state.at > end or state.at % self._size:
            return
        if state is hold.before:
            hold.before = None
        else:
            hold.state = NO_STATE
        self._keep(request, state, in_flight)

    def finish_steps(self) -> None:
        """As `PageAllocator.finish_steps`."""
        self._pool.unfinished.clear()

    def invalidate_unfinished(self) -> None:
        """As `PageAllocator.invalidate_unfinished`."""
        for digest in self._pool.unfinished:
            self._pool.remove(digest)
        self._pool.unfinished.clear()

    def invalidate(self, request: Request) -> None:
        """See that nobody starts from what a request has computed, since it may be wrong."""
        last = max([request.computed, request.states.state.at, *(state.at for state in request.states.kept)])
        for digest in request.hold.digests[: -(-last // self._size)]:
            self._pool.remove(digest)

    def free(self, request: Request, keep_until: float | None = None) -> None:
        """Take everything back; with `keep_until`, its last copy is evicted after others until that time."""
        hold = request.states
        for slot in hold.own_slots + [state.slot for state in hold.kept]:
            self._pool.free(slot)
        for slot in hold.pinned:
            self._pool.unpin(slot)
        self._pool.unreserve(hold.reserved)
        if keep_until is not None and (last := self.longest(request, 0, len(request.hold.digests), on_device=True)):
            self._pool.retain(request.hold.digests[last.depth - 1], keep_until)
        self._running -= 1
        self._answers -= hold.rolling is not None
        request.states = StateHold(unit=hold.unit, borders=hold.borders, spacing=hold.spacing)

    def expire(self, now: float) -> None:
        """End the retention of copies whose time has come."""
        self._pool.expire(now)

    def check(self, requests: list[Request]) -> None:
        """Assert that these are all who hold slots, that each has two, and that its state is where it stands."""
        holds = [request.states for request in requests]
        held = [slot for hold in holds for slot in hold.own_slots + [state.slot for state in hold.kept]]
        self._pool.check(held, [slot for hold in holds for slot in hold.pinned], sum(hold.reserved for hold in holds))
        assert self._running == len(requests)
        assert self._answers == sum(hold.rolling is not None for hold in holds)
        for request in requests:
            hold = request.states
            assert len(hold.own_slots) + hold.reserved == SLOTS_PER_REQUEST, request.id
            assert (hold.state.slot < 0) == (hold.state.at == 0), request.id
            drafts = hold.state.at - request.computed
            assert drafts > 0 if hold.before is not None else drafts == 0, request.id

    def _pin(self, hold: StateHold, start: FoundCopy) -> None:
        self._pool.pin(start.slot)
        self._stand(hold, start)

    def _stand(self, hold: StateHold, start: FoundCopy) -> None:
        hold.state = StateAt(start.depth * self._size, start.slot, shared=True)
        hold.last_kept = hold.state.at

    def _leave(self, hold: StateHold, state: StateAt) -> None:
        """Let go of a state: its slot can be had for the request's next step."""
        if state.shared:
            self._pool.unpin(state.slot)
        elif state.slot >= 0:
            self._pool.free(state.slot)
            assert self._pool.reserve(1)
            hold.reserved += 1

    def _is_wanted(self, request: Request, state: StateAt) -> bool:
        """Whether an own state stands at a border that is worth a copy."""
        hold, at = request.states, state.at
        if not self._copies or not state.is_own or at % self._size:
            return False
        if at >= request.prompt_tokens:
            # Copies in answers, most of which are soon replaced, leave half of the room to documents.
            room = self._pool.num_slots - SLOTS_PER_REQUEST * self._running
            return hold.rolling is not None or 2 * self._answers < room
        return at in hold.borders or at - hold.last_kept >= hold.spacing

    def _commit_kept(self, request: Request, end: int, in_flight: bool) -> None:
        hold = request.states
        ready = [state for state in hold.kept if state.at <= end]
        hold.kept = [state for state in hold.kept if state.at > end]
        for state in ready:
            self._keep(request, state, in_flight)

    def _keep(self, request: Request, state: StateAt, in_flight: bool) -> bytes:
        """Make an own state a copy, and say with which digest.

        Of an answer the newest alone is kept, unless somebody has started from others. It stands in for the one near
        the end of a short first prompt.
        """
        hold, depth = request.states, state.at // self._size
        digest = request.hold.digests[depth - 1]
        is_new = self._pool.keep(state.slot, digest, depth, state_used(request.hold.use, depth))
        if is_new and in_flight:
            self._pool.unfinished.add(digest)
        hold.last_kept = state.at
        if state.at == hold.first_turn and is_new:
            hold.spare = digest
        if state.at >= request.prompt_tokens:
            if hold.spare is not None:
                self._pool.spare(hold.spare)
                hold.spare = None
            if hold.rolling is not None and hold.rolling != digest:
                self._pool.drop_unused(hold.rolling)
            self._answers += (1 if is_new else 0) - (hold.rolling is not None)
            hold.rolling = digest if is_new else None
        return digest
