"""Who waits and who runs: requests are let in, preempted, and leave. `scheduler` says when.

A prompt is let in when its turn comes and pages for all of it and for the beginning of its answer can be reserved. An
answer that outgrows its reservation and finds no page preempts the request that came last, perhaps itself. Requests
whose end has pages reserved are spared. A preempted request keeps its tokens and its place, and comes back with pages
reserved for its longest end: nobody is preempted twice, and every request ends. But flexible requests are preempted for
any other that cannot be let in, as often as one comes.
"""

from __future__ import annotations

from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.requests.request import Request
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.next_in_line import NextInLine
from longreach.engine.scheduling.priority import seniority


class RunQueue:
    """The requests that wait and those that run; a running one has a slot of its own, and pages of the `allocator`.

    Attributes:
        waiting, running: by id.
        preemptions: how often a request was preempted.
        next: the waiting request whose turn it is.
        limits: of a step and of a request.
    """

    def __init__(self, allocator: PageAllocator, limits: Limits) -> None:
        self._allocator = allocator
        self.limits = limits
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.preemptions = 0
        self.next = NextInLine()
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))

    def is_running(self, request: Request) -> bool:
        """Whether it is this very request that runs under its id."""
        return self.running.get(request.id) is request

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self.waiting[request.id] = request
        self.next.unblock()

    def let_in(self, request: Request) -> bool:
        """Whether a request runs; one that waited gets a slot and its pages, if it can."""
        if request.seq_slot >= 0:
            return True
        if self.next.is_blocked:
            return False
        if not self._free_slots or not self._allocator.reserve(request, self.first_reservation(request)):
            self.next.block(request)
            return False
        del self.waiting[request.id]
        self.running[request.id] = request
        request.seq_slot = self._free_slots.pop()
        return True

    def give_way(self, now: float, *, in_flight: bool) -> bool:
        """Preempt flexible requests, the last first, until there is room for another that could not be let in.

        False if it has to be done once the step `in_flight` is settled.
        """
        request = self.next.refused
        while request is not None and self.waiting.get(request.id) is request and not self._has_room(request):
            if not (flexible := [r for r in self.running.values() if r.spec.flexible]):
                break
            if in_flight:
                return False
            self._preempt(max(flexible, key=seniority), now)
        self.next.refused = None
        return True

    def make_place(self, request: Request, now: float) -> bool:
        """Reserve an answer's next page by preempting others; False if it is preempted itself."""
        while not self._allocator.reserve(request, len(request.tokens)):
            victim = max((r for r in self.running.values() if self._may_be_preempted(r)), key=seniority)
            self._preempt(victim, now)
            if victim is request:
                return False
        return True

    def first_reservation(self, request: Request) -> int:
        """Tokens for which a request has to have room when it is let in."""
        if request.preempted:
            return request.max_length
        return min(request.max_length, request.prompt_tokens + self.limits.promised_tokens)

    def release(self, request: Request, keep_until: float | None = None) -> None:
        """Take everything back from a running request, which leaves; `keep_until` as for `PageAllocator.free`."""
        del self.running[request.id]
        self._allocator.free(request, keep_until)
        self._free_slots.append(request.seq_slot)
        request.seq_slot = -1
        self.next.unblock()

    def check(self) -> None:
        """Assert that everybody waits or runs, and that every slot is free or somebody's."""
        requests = list(self.running.values())
        for request in requests:
            assert 0 <= request.computed < len(request.tokens), request.id
            assert request.finish_reason is None, request.id
            assert not (request.preempted and self._may_be_preempted(request)), request.id
        for request in self.waiting.values():
            assert not request.pages, request.id
            assert not request.hold.reserved, request.id
            assert request.id not in self.running, request.id
        slots = [request.seq_slot for request in requests]
        assert sorted(slots + self._free_slots) == list(range(self.limits.max_num_seqs)), "a slot is lost or used twice"

    def _preempt(self, victim: Request, now: float) -> None:
        self._allocator.leave(victim, victim.computed)
        self.release(victim, now + self.limits.resume_seconds)
        victim.computed = victim.redo = 0
        victim.preempted = True
        victim.awaited = None
        self.preemptions += 1
        self.waiting[victim.id] = victim

    def _has_room(self, request: Request) -> bool:
        return bool(self._free_slots) and self._allocator.can_reserve(request, self.first_reservation(request))

    def _may_be_preempted(self, request: Request) -> bool:
        return self._allocator.reserved_tokens(request) < request.max_length
