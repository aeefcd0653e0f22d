"""Which tokens to compute next. Plain Python: it knows requests and page ids, and neither tensors nor models.

A request is let in, oldest first, once pages for its longest possible end can be promised to it; from then on nothing
can stop it for lack of memory. Within a step, tokens that complete a request (decodes) go first, and what is left of
the token budget is shared evenly among the prompts being read, so that a short prompt is not stuck behind a long one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .pages import PagePool
from .plan import Chunk, StepPlan
from .request import Request


@dataclass(frozen=True)
class Limits:
    """Bounds of a step and of a request: requests and tokens in one step, tokens in one sequence."""

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        """Raise a ValueError where the bounds cannot hold together."""
        if not 1 <= self.max_num_seqs <= self.max_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be at least 1 and at most max_batched_tokens "
                f"({self.max_batched_tokens}): every running request needs a token a step"
            )


class Scheduler:
    """The requests that wait and run, and the pages they hold.

    `plan` has no lasting effect but letting requests in and handing out pages; `commit` and `remove` are the only other
    calls that change state. `check` asserts the invariants and may be called between any two calls.
    """

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue.

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
            raise ValueError(f"{total} tokens do not fit into the KV cache of {self._capacity} tokens")
        self.waiting.append(request)

    def remove(self, request_id: str) -> Request | None:
        """Forget a request and free its pages at once; None if it is not here."""
        if request := self.running.pop(request_id, None):
            self._release(request)
            return request
        for request in self.waiting:
            if request.id == request_id:
                self.waiting.remove(request)
                return request
        return None

    def plan(self) -> StepPlan | None:
        """Decide the next step, or None when there is nothing to compute."""
        self._let_in()
        decodes = [request for request in self.running.values() if request.wanted == 1]
        prompts = sorted((r for r in self.running.values() if r.wanted > 1), key=lambda request: request.wanted)
        chunks = [self._chunk(request, 1) for request in decodes]
        budget = self.limits.max_batched_tokens - len(decodes)
        for position, request in enumerate(prompts):  # shortest first: what one leaves over goes to the longer ones
            length = min(request.wanted, budget // (len(prompts) - position))
            if length:
                chunks.append(self._chunk(request, length))
                budget -= length
        chunks.sort(key=lambda chunk: chunk.length != 1)
        return StepPlan(tuple(chunks)) if chunks else None

    def commit(self, plan: StepPlan, drawn: dict[str, int]) -> None:
        """Record that `plan` was computed and which token each completed request drew; finished ones leave."""
        for chunk in plan.chunks:
            request = chunk.request
            if self.running.get(request.id) is not request:
                continue  # removed while the step ran
            assert request.computed == chunk.start, (request.id, request.computed, chunk.start)
            draws = chunk.draws
            request.computed = chunk.end
            if draws:
                request.append(drawn[request.id])
                if request.finish_reason is not None:
                    self.remove(request.id)

    def check(self) -> None:
        """Assert that pages and requests agree."""
        requests = list(self.running.values())
        self.pool.check([r.pages for r in requests], [r.promised_pages for r in requests])
        for request in requests:
            assert len(request.pages) * self.pool.page_size >= request.computed, request.id
            assert 0 <= request.computed < len(request.tokens), request.id
            assert request.finish_reason is None, request.id
        for request in self.waiting:
            assert not request.pages, request.id
            assert not request.promised_pages, request.id
            assert request.id not in self.running, request.id
        rows = [request.row for request in requests]
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_num_seqs)), "a row is lost or used twice"

    @property
    def _capacity(self) -> int:
        return self.pool.num_pages * self.pool.page_size

    def _let_in(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            pages = self.pool.pages_for(self.waiting[0].max_length)
            if not self.pool.reserve(pages):
                return  # the oldest goes first even if a smaller one would fit: nobody is passed over for ever
            request = self.waiting.popleft()
            request.promised_pages = pages
            request.row = self._free_rows.pop()
            self.running[request.id] = request

    def _chunk(self, request: Request, length: int) -> Chunk:
        missing = self.pool.pages_for(request.computed + length) - len(request.pages)
        if missing > 0:
            request.pages += self.pool.take(missing)
            request.promised_pages -= missing
        return Chunk(request, request.computed, length)

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages, request.promised_pages)
        request.pages, request.promised_pages = [], 0
        self._free_rows.append(request.row)
