"""Which tokens to compute next. Plain Python: it knows requests and page ids, and neither tensors nor models.

Every step first takes one token, and its drafts, from each request that is writing its answer. Prompts get the rest, in
the order of `priority.rank`; `chunk_size` says how many tokens of each.

Who is let in, and who has to give way, is said in `run_queue`.

A step can be planned while the one before it runs: `advance` says that it was started, and the tokens that it draws are
wanted before they are known; `settle` says what they are. If one of them ends its request, what the next step computes
for it is dropped.

There are no phases: a prompt that begins like an earlier one takes over the pages that the prefix cache has, at any
moment, and waits where the next page is being computed by a request before it. Pages that the host has are brought back
beside a step, in which their request computes nothing.
"""

from __future__ import annotations

from itertools import chain

from longreach.engine.cost_model import StepCost, StepTime
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.requests.awaited import Awaited
from longreach.engine.requests.prompt_lookup import MAX_DRAFTS
from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.scheduling.answer_lengths import AnswerLengths
from longreach.engine.scheduling.chunk_size import ChunkSizer, StepBudget
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.priority import rank, seniority
from longreach.engine.scheduling.restore_time import RestoreTime
from longreach.engine.scheduling.run_queue import RunQueue

# How long a request waits for the disk while nobody knows what a step costs.
_UNKNOWN_SECONDS = 30.0


class Scheduler:
    """The requests that wait and run, and the pages they hold.

    `plan` has no lasting effect but letting requests in and handing out pages; `advance`, `hold_back`, `settle`,
    `remove` and `discard` are the only other calls that change state. `check` asserts the invariants and may be called
    between any two calls. `step_time` is taught by whoever runs the steps.
    """

    def __init__(self, allocator: PageAllocator, limits: Limits) -> None:
        self.allocator = allocator
        self._prefixes, self._held, self._states = allocator.prefixes, allocator.held, allocator.states
        self.step_time = StepTime()
        self.answer_lengths = AnswerLengths()
        self.restore_time = RestoreTime()
        self._now = 0.0
        self._queue = RunQueue(allocator, limits)
        self.waiting, self.running = self._queue.waiting, self._queue.running
        self._in_flight: list[StepPlan] = []

    @property
    def limits(self) -> Limits:
        """Bounds of a step and of a request; others may take their place between two steps."""
        return self._queue.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._queue.limits = limits

    @property
    def preemptions(self) -> int:
        """How often a request was preempted."""
        return self._queue.preemptions

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            ValueError: it could never run, whatever else is in flight; the message is the caller's.
        """
        if not request.spec.prompt:
            raise ValueError("the prompt is empty")
        if request.spec.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.spec.max_tokens}")
        if request.is_complete:
            raise ValueError(f"max_tokens are {request.spec.max_tokens}, and as many are drawn already")
        total = request.prompt_tokens + request.spec.max_tokens
        if total > self.limits.max_model_len:
            raise ValueError(
                f"{request.prompt_tokens} prompt tokens and {request.spec.max_tokens} tokens to generate exceed the "
                f"context of {self.limits.max_model_len} tokens"
            )
        if request.spec.rope_factor not in (self.limits.rope_factors or (0.0,)):
            raise ValueError(f"there are no rotary frequencies of the factor {request.spec.rope_factor:g}")
        if not self.allocator.fits(request.max_length):
            raise ValueError(f"{total} tokens do not fit into the KV cache of {self.allocator.num_tokens} tokens")
        request.foresee(self.limits.dense_share)
        self.allocator.add(request, chain(self.running.values(), self.waiting.values()))
        self._queue.add(request)

    def remove(self, request_id: str, now: float = 0.0) -> Request | None:
        """Forget a request whose caller has gone; None if it is not here.

        Its pages are given back at once, and kept for a retry as long as nobody needs their memory more. That counts
        what is being computed: whoever takes it over computes later.
        """
        if (request := self.running.get(request_id)) is not None:
            end, in_flight = request.computed, False
            for chunk in (chunk for plan in self._in_flight for chunk in plan.chunks if chunk.request is request):
                end, in_flight = min(chunk.end - len(chunk.drafts), request.known), True
                self.allocator.commit(request, chunk.start, end, in_flight=True)
            self.allocator.leave(request, end, in_flight=in_flight)
            self._queue.release(request, now + self.limits.resume_seconds)
            if request.known > request.prompt_tokens:  # its caller has found the answer's end
                self.answer_lengths.note(request.known - request.prompt_tokens)
            return request
        if (request := self.waiting.pop(request_id, None)) is not None:
            self.allocator.forget(request)
        return request

    def discard(self, request: Request) -> None:
        """Forget a running request whose step failed; nobody takes over the pages that it held."""
        self.allocator.invalidate(request)
        self._queue.release(request)

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Decide the next step, or None when there is nothing to compute before the step in flight is settled."""
        self._now = now
        self.allocator.expire(now)
        streams = self._streams(now) if self._queue.give_way(now, in_flight=bool(self._in_flight)) else None
        if streams is None:
            return None
        chunks = streams + self._prompts(streams)
        return StepPlan.of(chunks) if chunks else None

    def advance(self, plan: StepPlan) -> None:
        """Record that `plan` is being computed: the next one may be planned."""
        self._in_flight.append(plan)
        running = self.running
        for chunk in plan.chunks:
            request = chunk.request
            if running.get(request.id) is request:
                request.computed, request.redo = chunk.end - len(chunk.drafts), 0
                if self._states is not None:
                    self._states.advance(request, chunk.end, drafts=bool(chunk.drafts))
                if chunk.scored:
                    request.scored = chunk.scored.stop
                if chunk.num_draws:
                    request.expect()

    def hold_back(self, request: Request) -> None:
        """Record that a planned chunk of a request is not computed, nor any other before its kernels are compiled."""
        request.compiling = True
        request.hold.not_launched = True

    def settle(self, drawn: dict[str, list[int]]) -> None:
        """Record which tokens the chunks of the oldest step in flight drew; requests that are finished leave."""
        plan = self._in_flight.pop(0)
        if not self._in_flight:
            self.allocator.finish_steps()
        running = self.running
        for chunk in plan.chunks:
            request = chunk.request
            if running.get(request.id) is not request:
                continue  # removed, or finished, while the step ran
            end = chunk.end - len(chunk.drafts)
            for position, token in enumerate(chunk.standing(drawn[request.id]) if chunk.num_draws else ()):
                if position:  # all but the last are drafts that stand, and computed
                    request.computed += 1
                    end += 1
                request.receive(token)
                if request.finish_reason is not None:
                    break
            # Of an answer that ends with drafts that all stand, the state is sound, too.
            if chunk.drafts and (request.finish_reason is None or end == chunk.end):
                request.computed = self.allocator.settle_drafts(request, end)
                end, request.redo = request.computed, end - request.computed
            if self.allocator.commit(request, chunk.start, end):
                self._queue.next.unblock()  # who waits may need fewer pages now
            self._held.drop(request, end)
            if request.finish_reason is not None:
                self.answer_lengths.note(request.known - request.prompt_tokens)
                self.allocator.leave(request, end)
                self._queue.release(request)

    def abandon(self) -> list[Request]:
        """Forget the running requests of the oldest step in flight, which failed, and invalidate what it wrote."""
        plan = self._in_flight.pop(0)
        self.allocator.invalidate_unfinished()
        requests = [c.request for c in plan.chunks if self._queue.is_running(c.request)]
        for request in requests:
            self.discard(request)
        return requests

    def moves_failed(self, moves: CacheMoves) -> list[Request]:
        """The copies of pages for the next step failed; the requests that cannot go on without them."""
        return self.allocator.moves_failed(moves, list(self.running.values()))

    @property
    def num_free_slots(self) -> int:
        """How many more requests may run."""
        return self.limits.max_num_seqs - len(self.running)

    def first_reservation(self, request: Request) -> int:
        """Tokens for which a request has to have room when it is let in."""
        return self._queue.first_reservation(request)

    def unread(self) -> list[tuple[Request, int]]:
        """The requests whose prompts are not read to their ends, and up to where each is computed or cached."""
        return [(request, self._prefixes.lookup(request)) for request in (*self._reading(), *self.waiting.values())]

    def check(self) -> None:
        """Assert that pages and requests agree."""
        self.allocator.check(list(self.running.values()))
        self._queue.check()

    def _streams(self, now: float) -> list[Chunk] | None:
        """The token that each answer wants and the drafts behind it, which leave half of the step to prompts.

        None if that depends on what the step in flight draws: an answer needs its own tokens, or must be preempted.
        """
        wanting = (request for request in self.running.values() if request.is_answering and not request.is_complete)
        requests = sorted(wanting, key=seniority)
        if any(request.pending and request.needs_its_tokens for request in requests):
            return None
        room = min(MAX_DRAFTS, (self.limits.max_batched_tokens - len(requests)) // 2)
        left = self.limits.max_batched_tokens - len(requests)  # for what is computed again
        chunks = []
        for request in requests:
            if request.seq_slot < 0 or request.compiling:
                continue  # preempted, or to be computed later
            wanted = 1 + request.redo
            if wanted > left + 1:
                continue  # in the next step
            if not self.allocator.reserve(request, len(request.tokens)):
                if self._in_flight:
                    return None
                if not self._queue.make_place(request, now):
                    continue
            if (most := self._held.longest_chunk(request)) < wanted:
                continue  # until the step in flight is settled, which leaves pages behind
            drafts = ()
            if request.computed >= request.prompt_tokens or not self.limits.batch_invariant:
                reserved = self.allocator.reserved_tokens(request) - len(request.tokens)
                drafts = request.draft(min(room, left + 1 - wanted, reserved, most - wanted))
            room -= len(drafts)
            left -= wanted - 1 + len(drafts)
            chunks.append(self._chunk(request, wanted + len(drafts), drafts))
        return chunks

    def _prompts(self, streams: list[Chunk]) -> list[Chunk]:
        """Chunks of prompts for what the `streams` leave of a step; lets requests in whose turn has come."""
        requests = self._reading()
        if not self._queue.next.is_blocked:
            requests += self.waiting.values()
        if not (requests := [request for request in requests if not request.compiling]):
            return []
        cost = self.step_time.cost
        left = StepBudget.beside(streams, self.limits, self.step_time)
        sizer = ChunkSizer(self.limits, cost)
        cached_until = {request.id: self._prefixes.lookup(request) for request in requests}
        requests.sort(key=lambda r: rank(r, cached_until[r.id], cost, self.limits.max_batched_tokens))
        chunks: list[Chunk] = []
        in_flight = self._digests_in_flight()
        readers: list[Chunk] = []  # see `PrefixSharing.awaits`
        if self._states is not None:
            readers += (chunk for plan in self._in_flight for chunk in plan.chunks if self._leaves_copies(chunk))
        for request in requests:
            if left.is_spent:
                break
            start = cached_until[request.id]
            if any(self._prefixes.awaits(request, start, reader.request, reader.end) for reader in readers):
                continue
            if not self._can_compute(request, cached_until[request.id], in_flight):
                continue
            start = request.computed
            most = min(left.tokens, self._held.longest_chunk(request))
            if most < 1:
                continue  # until the step in flight is settled, which leaves pages behind
            stop = self._prefixes.first_of(in_flight, request, start, self._prefixes.meets(request, start + most))
            length, fills_step = sizer.length(request, stop, left)
            if length:
                self._goes_on(request)
                chunks.append(self._chunk(request, length))
                in_flight.update(self._prefixes.digests(request, start, start + length))
                if self._states is not None and self._leaves_copies(chunks[-1]):
                    readers.append(chunks[-1])
                left.take(request, start, length, cost)
            if fills_step:
                break
        return chunks

    def _reading(self) -> list[Request]:
        """Running requests whose prompts are being read."""
        return [request for request in self.running.values() if not request.is_answering and request.wanted > 1]

    def _digests_in_flight(self) -> set[bytes]:
        """Of the pages that the steps in flight compute: whoever else wants these waits for them."""
        return {
            digest
            for plan in self._in_flight
            for chunk in plan.chunks
            if self._queue.is_running(chunk.request)
            for digest in self._prefixes.digests(chunk.request, chunk.start, chunk.end)
        }

    def _leaves_copies(self, chunk: Chunk) -> bool:
        """Whether a chunk's request is here and is going to leave copies of its state in its prompt."""
        request = chunk.request
        return self._queue.is_running(request) and any(at >= chunk.end for at in request.states.borders)

    def _can_compute(self, request: Request, start: int, in_flight: set[bytes]) -> bool:
        """Whether a request computes from `start` on in this step; it is let in and shares cached pages for that.

        It waits where somebody else computes its next page, and while pages come back from the host or from disk.
        """
        if self._prefixes.first_of(in_flight, request, start, start + 1) == start:
            return False
        runs = self._queue.is_running(request)
        if not runs and self._prefixes.awaits_disk(request, self._seconds_to_read):
            request.awaited = request.awaited or Awaited(self._now, 0, 0)
            return False
        if not self._queue.let_in(request):
            self._prefixes.refused(request)
            request.awaited = None  # from here on it waits for others
            return False
        before = Awaited(self._now, request.hold.host_tokens, request.hold.disk_tokens)
        request.computed, waits = self._prefixes.match_prefix(request, self.limits.restored_pages)
        if waits or self._prefixes.awaits_disk(request, self._seconds_to_read):
            request.awaited = request.awaited or before
            return False
        return True

    def _goes_on(self, request: Request) -> None:
        """A request computes: what it has waited for is there."""
        self._prefixes.goes_on(request)
        if (awaited := request.awaited) is not None:
            hold, request.awaited = request.hold, None
            self.restore_time.observe(
                self._now - awaited.since, hold.host_tokens - awaited.host, hold.disk_tokens - awaited.disk
            )

    def _seconds_to_read(self, request: Request, start: int, end: int) -> float:
        """Predicted time to compute tokens `start` to `end` of a prompt."""
        if (cost := self.step_time.cost) == StepCost():
            return _UNKNOWN_SECONDS
        return cost.prefill_seconds(start, end, self.limits.max_batched_tokens, request.visible)

    def _chunk(self, request: Request, length: int, drafts: tuple[int, ...] = ()) -> Chunk:
        self.allocator.allocate(request, request.computed + length)
        state = None if self._states is None else self._states.begin(request)
        return Chunk.of(request, length, drafts, batch_invariant=self.limits.batch_invariant, state=state)
