"""What a request that is not here would get: its cached prefix, and when its first token comes. Nothing changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import msgspec

from longreach.engine.cost_model import StepCost
from longreach.engine.kv_cache.state_allocator import SLOTS_PER_REQUEST
from longreach.engine.looks import Look, Looked
from longreach.engine.requests.page_hold import PageHold, Sought, common_pages
from longreach.engine.requests.request import Request
from longreach.engine.scheduling.priority import due_at, rank
from longreach.engine.scheduling.queue_forecast import Prompt, QueueForecast
from longreach.engine.scheduling.scheduler import Scheduler

_DIGEST_BYTES = 32
# Prompts that begin alike, of which each other one is compared with at most so many.
_MOST_ALIKE = 8


class EntrySizes(NamedTuple):
    """Bytes of a page and of a state, on all ranks together."""

    page: int
    state: int


NO_SIZES = EntrySizes(0, 0)


@dataclass(frozen=True)
class _Sought:
    """A request that is not here, as `page_hold.Sought`."""

    skippable: int
    hold: PageHold


class _Queue(NamedTuple):
    """Requests whose prompts are not read, with up to where each is computed or cached: those that come before a
    request that is looked for, and those that come behind it."""

    first: list[tuple[Request, int]]
    behind: list[tuple[Request, int]]


class Forecaster:
    """Looks at a `scheduler` at the time `now`, between two steps; `busy` seconds of steps in flight are left."""

    def __init__(self, scheduler: Scheduler, now: float, busy: float, sizes: EntrySizes = NO_SIZES) -> None:
        self._scheduler = scheduler
        self._allocator, self._limits = scheduler.allocator, scheduler.limits
        self._cost, self._chunk = scheduler.step_time.cost, scheduler.limits.max_batched_tokens
        self._now = now
        self._busy = busy
        self._sizes = sizes

    def answer(self, look: Look) -> Looked:
        """The answer to a look."""
        sizes, total = self._sizes, look.prompt_tokens
        digests = [look.digests[at : at + _DIGEST_BYTES] for at in range(0, len(look.digests), _DIGEST_BYTES)]
        sought = _Sought(total - 1, PageHold(digests=digests))
        found = self._allocator.cached(sought)
        gpu, host, disk = (
            pages * sizes.page + states * sizes.state for pages, states in zip(found.pages, found.states, strict=True)
        )
        length = total + min(look.max_tokens - 1, self._limits.promised_tokens)
        states = 0 if self._allocator.states is None else SLOTS_PER_REQUEST
        groups = self._allocator.groups
        ids_of_one = groups.ids_for(length)
        ids = ids_of_one + (look.answers - 1) * (
            ids_of_one - groups.ids_for(total // groups.page_size * groups.page_size)
        )
        cached = sum(found.tokens)
        visible = look.attention.visible().beside_dense(self._limits.dense_share)
        alone = self._cost.prefill_seconds(cached, total, self._chunk, visible)
        own = look.flexible, due_at(self._now, look.priority, alone), total - cached
        queue = self._queue(own)
        looked = Looked(
            look_id=look.look_id,
            total=total,
            gpu=found.tokens[0],
            host=found.tokens[1],
            disk=found.tokens[2],
            gpu_bytes=gpu,
            host_bytes=host,
            disk_bytes=disk,
            kv_bytes=ids * sizes.page + look.answers * states * sizes.state,
            fits_now=self._allocator.missing(sought, length) + ids - ids_of_one <= self._allocator.num_available
            and look.answers <= self._scheduler.num_free_slots,
            ahead=len(queue.first),
        )
        if self._cost == StepCost():
            return looked  # nothing has been measured
        prompt = Prompt(start=cached, end=total, visible=visible, flexible=look.flexible, waits=True)
        return msgspec.structs.replace(
            looked,
            seconds_alone=alone,
            seconds_whole=self._cost.prefill_seconds(0, total, self._chunk, visible),
            seconds_dense=self._cost.prefill_seconds(0, total, self._chunk),
            seconds_now=max(alone, self._behind(queue, prompt, sought, length)),
        )

    def _queue(self, own: tuple[bool, float, int]) -> _Queue:
        """The queue as one of this rank sees it."""
        ranks = [(rank(*prompt, self._cost, self._chunk), prompt) for prompt in self._scheduler.unread()]
        ranks.sort(key=itemgetter(0))
        first = [prompt for of_prompt, prompt in ranks if of_prompt <= own]
        return _Queue(first, [prompt for _, prompt in ranks[len(first) :]])

    def _behind(self, queue: _Queue, own: Prompt, sought: Sought, length: int) -> float:
        """Seconds until the prompt `own` has been read, which is `sought`, and which is let in when there are pages for
        `length` tokens."""
        scheduler, allocator = self._scheduler, self._allocator
        running = [*scheduler.running.values()]
        # Flexible requests are preempted for others.
        yielding = [] if own.flexible else [request for request in running if request.spec.flexible]
        pages = allocator.num_available + sum(request.hold.num_ids for request in yielding)
        slots = scheduler.num_free_slots + len(yielding)
        forecast = QueueForecast(self._cost, scheduler.step_time.caution, self._limits, pages, slots)
        forecast.wait_until(self._busy)
        for request in running:
            if request.is_answering and request not in yielding:
                forecast.write(len(request.tokens), self._prompt(request, len(request.tokens) - 1))
        lengths = [scheduler.first_reservation(request) for request, _ in queue.first if request.seq_slot < 0]
        # Pages are counted where they are short: that takes a look at each.
        is_short = sum(map(allocator.groups.ids_for, [*lengths, length])) > pages
        read = _PagesRead(allocator.page_size)
        for request, done in queue.first:
            shared = read.by_others(request.hold.digests)
            forecast.read(self._prompt(request, max(done, shared), is_short=is_short))
            read.add(request.hold.digests)
        start = max(own.start, min(read.by_others(sought.hold.digests), own.end - 1))
        forecast.read(replace(own, start=start, missing=allocator.missing(sought, length) if is_short else 0))
        forecast.end_step(next((self._prompt(request, done) for request, done in queue.behind), None))
        return forecast.seconds

    def _prompt(self, request: Request, done: int, *, is_short: bool = False) -> Prompt:
        """What is expected of a request of which so many tokens are done."""
        end, waits = len(request.tokens), request.seq_slot < 0
        missing = 0
        if waits and is_short:
            missing = self._allocator.missing(request, self._scheduler.first_reservation(request))
        return Prompt(
            start=min(done, end - 1),
            end=end,
            visible=request.visible if request.visible_to_answer is None else request.visible_to_answer,
            flexible=request.spec.flexible,
            answer=self._scheduler.answer_lengths.expected(request.spec.max_tokens - request.generated),
            waits=waits,
            missing=missing,
            held=missing if waits else request.hold.num_ids,
        )


class _PagesRead:
    """The digests of the prompts that have been read, of which others may begin alike."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._by_first: dict[bytes, list[list[bytes]]] = {}

    def add(self, digests: list[bytes]) -> None:
        """A prompt has been read."""
        if digests:
            alike = self._by_first.setdefault(digests[0], [])
            if len(alike) < _MOST_ALIKE:
                alike.append(digests)

    def by_others(self, digests: list[bytes]) -> int:
        """Tokens up to which one of these begins like this one."""
        alike = self._by_first.get(digests[0], ()) if digests else ()
        return self._size * max((common_pages(digests, other) for other in alike), default=0)
