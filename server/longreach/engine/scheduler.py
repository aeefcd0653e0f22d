"""Which tokens to compute next. Plain Python: it knows requests and page ids, and neither tensors nor models.

Every step first takes one token (and its drafts) from each request that is writing its answer. What is left of the step
goes to prompts in the order of `order.rank`: all of the token budget when nobody is writing, else as much as keeps
the step within the bound on inter-token delay. A prompt is let in when its turn comes and pages for its longest
possible end can be promised to it; from then on nothing can stop it for lack of memory.

There are no phases: a prompt that begins like an earlier one takes over the pages that the prefix cache has, at any
moment, and waits where the next page is being computed by a request before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .order import rank, seconds_for_prompts
from .pages import PagePool
from .plan import Chunk, StepPlan
from .prefix_cache import PageHasher
from .request import Request
from .speculation import MAX_DRAFTS
from .step_time import StepTime, Work

# However little time is left in a step, the first prompt's chunk has so many tokens: progress is guaranteed.
_LEAST_CHUNK = 16


@dataclass(frozen=True)
class Limits:
    """Bounds of a step and of a request: requests and tokens in one step, tokens in one sequence.

    `max_itl` is the longest a step should take while answers are being written, in seconds; `resume_seconds` how long
    the pages of a cancelled request are kept before others.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    max_itl: float = math.inf
    resume_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Raise a ValueError where the bounds cannot hold together."""
        if not 1 <= self.max_num_seqs <= self.max_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be at least 1 and at most max_batched_tokens "
                f"({self.max_batched_tokens}): every running request needs a token a step"
            )
        if not self.max_itl > 0:
            raise ValueError(f"max_itl must be positive, got {self.max_itl}")


class Scheduler:
    """The requests that wait and run, and the pages they hold.

    `plan` has no lasting effect but letting requests in and handing out pages; `commit` and `remove` are the only other
    calls that change state. `check` asserts the invariants and may be called between any two calls. Without a `hasher`
    there is no prefix cache. `step_time` is taught by whoever runs the steps.
    """

    def __init__(self, pool: PagePool, limits: Limits, hasher: PageHasher | None = None) -> None:
        self.pool = pool
        self.limits = limits
        self.step_time = StepTime()
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self._hasher = hasher
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._blocked = False  # the next in line could not be let in, and nothing has changed since

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
        total = request.prompt_tokens + request.spec.max_tokens
        if total > self.limits.max_model_len:
            raise ValueError(
                f"{request.prompt_tokens} prompt tokens and {request.spec.max_tokens} tokens to generate exceed the "
                f"context of {self.limits.max_model_len} tokens"
            )
        if self.pool.pages_for(request.max_length) > self.pool.num_pages:
            capacity = self.pool.num_pages * self.pool.page_size
            raise ValueError(f"{total} tokens do not fit into the KV cache of {capacity} tokens")
        if self._hasher is not None:
            self._hasher.extend(request.digests, request.tokens, request.spec.cache_salt)
        self.waiting[request.id] = request
        self._blocked = False

    def remove(self, request_id: str, now: float = 0.0) -> Request | None:
        """Forget a request whose caller has gone; None if it is not here.

        Its pages are given back at once, and kept for a retry as long as nobody needs their memory more.
        """
        if (request := self.running.get(request_id)) is not None:
            self.pool.cache.retain(request.pages, now + self.limits.resume_seconds)
            self._release(request)
            return request
        return self.waiting.pop(request_id, None)

    def discard(self, request: Request) -> None:
        """Forget a running request whose step failed; nobody takes over the pages that it held."""
        for page in request.pages:
            self.pool.cache.forget(page)
        self._release(request)

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Decide the next step, or None when there is nothing to compute."""
        self.pool.cache.expire(now)
        streams = self._streams()
        chunks = streams + self._prompts(streams)
        chunks.sort(key=lambda chunk: chunk.length != 1)
        return StepPlan(tuple(chunks)) if chunks else None

    def commit(self, plan: StepPlan, drawn: dict[str, list[int]]) -> None:
        """Record that `plan` was computed and which tokens its chunks drew; requests that are finished leave."""
        for chunk in plan.chunks:
            request = chunk.request
            if self.running.get(request.id) is not request:
                continue  # removed while the step ran
            request.computed = chunk.end - len(chunk.drafts)
            if chunk.num_draws:
                for position, token in enumerate(chunk.standing(drawn[request.id])):
                    request.computed += position > 0  # all but the last are drafts that stand, and computed
                    request.append(token)
                    if request.finish_reason is not None:
                        break
            self._name_pages(request, chunk.start)
            if request.finish_reason is not None:
                self._release(request)

    def check(self) -> None:
        """Assert that pages and requests agree."""
        requests = list(self.running.values())
        self.pool.check([r.pages for r in requests], [r.promised_pages for r in requests])
        size = self.pool.page_size
        for request in requests:
            assert len(request.pages) * size >= request.computed, request.id
            assert len(request.pages) + request.promised_pages == self.pool.pages_for(request.max_length), request.id
            assert 0 <= request.computed < len(request.tokens), request.id
            assert request.finish_reason is None, request.id
            for page in request.pages[request.computed // size :]:
                assert self.pool.holders(page) == 1, f"{request.id} writes to page {page}, which others read"
                assert not self.pool.cache.is_named(page), f"{request.id} writes to page {page}, which is named"
        for request in self.waiting.values():
            assert not request.pages, request.id
            assert not request.promised_pages, request.id
            assert request.id not in self.running, request.id
        rows = [request.row for request in requests]
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_num_seqs)), "a row is lost or used twice"

    def _streams(self) -> list[Chunk]:
        """The token that each answer wants and the drafts behind it, which leave half of the step to prompts."""
        requests = [request for request in self.running.values() if request.wanted == 1]
        room = min(MAX_DRAFTS, (self.limits.max_batched_tokens - len(requests)) // 2)
        chunks = []
        for request in requests:
            drafts = request.draft(room)
            room -= len(drafts)
            chunks.append(self._chunk(request, 1 + len(drafts), drafts))
        return chunks

    def _prompts(self, streams: list[Chunk]) -> list[Chunk]:
        """Chunks of prompts for what the `streams` leave of a step; lets requests in whose turn has come."""
        requests = [request for request in self.running.values() if request.wanted > 1]
        if not self._blocked:
            requests += self.waiting.values()
        if not requests:
            return []
        cost = self.step_time.cost
        budget = self.limits.max_batched_tokens - sum(chunk.length for chunk in streams)
        seconds = math.inf
        if streams:
            taken = Work.of_step((chunk.start, chunk.length) for chunk in streams)
            seconds = seconds_for_prompts(taken, cost, self.limits.max_itl)
        reach = {request.id: self._reach(request) for request in requests}
        requests.sort(key=lambda r: rank(r, reach[r.id], cost, self.limits.max_batched_tokens))
        chunks: list[Chunk] = []
        claimed: set[bytes] = set()  # pages that this step computes; whoever else wants them waits for them
        for request in requests:
            if budget < 1 or seconds <= 0:
                break
            start = reach[request.id]
            if self._unclaimed(request, start, start + 1, claimed) == start or not self._let_in(request):
                continue
            self._take_over(request)
            start, limit = request.computed, min(request.wanted, budget)
            length = limit if seconds == math.inf else cost.longest_chunk(start, limit, seconds)
            if length < min(_LEAST_CHUNK, limit):
                length = 0 if chunks else min(_LEAST_CHUNK, limit)
            length = self._unclaimed(request, start, start + length, claimed) - start
            if length:
                chunks.append(self._chunk(request, length))
                claimed.update(
                    request.digests[start // self.pool.page_size : -(-(start + length) // self.pool.page_size)]
                )
                budget -= length
                seconds -= cost.seconds(Work.of_chunk(start, length))
        return chunks

    def _reach(self, request: Request) -> int:
        """Where a prompt stands, counting the pages that it could take over; looks further than last time only."""
        size, digests = self.pool.page_size, request.digests
        if request.computed % size:
            return request.computed
        page = max(request.computed, request.reach) // size
        while page < self._most_shared(request) and self.pool.cache.find(digests[page]) is not None:
            page += 1
        request.reach = page * size
        return request.reach

    def _most_shared(self, request: Request) -> int:
        """How many of its first pages a request can take over: its prompt's last token has to be computed."""
        return min(len(request.digests), (request.prompt_tokens - 1) // self.pool.page_size)

    def _unclaimed(self, request: Request, start: int, end: int, claimed: set[bytes]) -> int:
        """The end of the tokens from `start` to `end` before the first page that another chunk of the step computes."""
        size = self.pool.page_size
        last = min(-(-end // size), self._most_shared(request))
        for page in range(-(-start // size), last):
            if request.digests[page] in claimed:
                return page * size
        return end

    def _let_in(self, request: Request) -> bool:
        """Whether a request runs, having got a row, the pages it shares and the promise of the others if it waited."""
        if request.row >= 0:
            return True
        if self._blocked:
            return False  # who is next in line goes first, even if another would fit: nobody is passed over for ever
        shared = self.pool.find(request.digests[: self._most_shared(request)])
        promised = self.pool.pages_for(request.max_length) - len(shared)
        if not self._free_rows or not self.pool.reserve(promised, shared):
            self._blocked = True
            return False
        del self.waiting[request.id]
        self.running[request.id] = request
        request.row = self._free_rows.pop()
        request.pages, request.promised_pages = shared, promised
        request.computed = request.cached = len(shared) * self.pool.page_size
        return True

    def _take_over(self, request: Request) -> None:
        """Take the next pages from the prefix cache, as far as it has them."""
        size = self.pool.page_size
        if request.computed % size:
            return
        for digest in request.digests[request.computed // size : self._most_shared(request)]:
            if (page := self.pool.cache.find(digest)) is None:
                return
            self.pool.take_over(page)
            request.pages.append(page)
            request.promised_pages -= 1
            request.computed += size
            request.cached += size

    def _chunk(self, request: Request, length: int, drafts: tuple[int, ...] = ()) -> Chunk:
        missing = self.pool.pages_for(request.computed + length) - len(request.pages)
        if missing > 0:
            request.pages += self.pool.take(missing)
            request.promised_pages -= missing
        return Chunk(request, request.computed, length, drafts)

    def _name_pages(self, request: Request, start: int) -> None:
        """Offer the pages to others that were completed since `start` tokens were computed."""
        if self._hasher is None:
            return
        size = self.pool.page_size
        first, last = start // size, request.computed // size
        if first < last:
            self._hasher.extend(request.digests, request.tokens, request.spec.cache_salt)
            self._blocked = False
        for page in range(first, last):
            self.pool.cache.name(request.pages[page], request.digests[page])

    def _release(self, request: Request) -> None:
        del self.running[request.id]
        self.pool.release(request.pages, request.promised_pages)
        request.pages, request.promised_pages = [], 0
        self._free_rows.append(request.row)
        self._blocked = False
