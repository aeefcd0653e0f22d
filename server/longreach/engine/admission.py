"""Which requests may wait: the owner's ledger of what it has sent to the engine, and how long that will take to read.

That a request fits is known before it is sent (`Started.max_model_len`); whether there is room in the queue is decided
here, at once and without asking the engine, which is busy with a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import QueueFullError
from .messages import Update
from .step_time import Reach, StepCost


@dataclass
class _Entry:
    prompt_tokens: int
    reach: Reach | None = None
    computed: int = 0
    started: bool = False


class Admission:
    """Bounds on the requests that wait, in number and in prompt tokens.

    A request waits from `enter`, before it is sent, to its first update or to `leave`. `cost` is what the engine last
    said a step costs; `chunk` the tokens that it reads in one.
    """

    def __init__(self, max_requests: int, max_tokens: int, chunk: int) -> None:
        self.cost = StepCost()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._chunk = chunk
        self._entries: dict[str, _Entry] = {}
        self._waiting = 0
        self._waiting_tokens = 0

    @property
    def waiting_requests(self) -> int:
        """Requests of which nothing has been computed yet."""
        return self._waiting

    @property
    def waiting_tokens(self) -> int:
        """Their prompts' tokens."""
        return self._waiting_tokens

    @property
    def unread_tokens(self) -> int:
        """Prompt tokens of all requests that are not computed yet."""
        return sum(entry.prompt_tokens - entry.computed for entry in self._entries.values())

    def _check(self, requests: int, prompt_tokens: int) -> None:
        full = self._waiting + requests > self._max_requests
        if full or (self._waiting and self._waiting_tokens + prompt_tokens > self._max_tokens):
            raise QueueFullError(
                f"{self._waiting} requests with {self._waiting_tokens} prompt tokens are waiting already; this server "
                f"lets {self._max_requests} requests and {self._max_tokens} tokens wait",
                retry_after=max(1, math.ceil(self.prefill_seconds())),
            )

    def prefill_seconds(self) -> float:
        """Predicted time to read what is left of all prompts."""
        return sum(
            self.cost.prefill_seconds(entry.computed, entry.prompt_tokens, self._chunk, entry.reach)
            for entry in self._entries.values()
            if entry.computed < entry.prompt_tokens
        )

    def seconds_to_read(self, request_id: str) -> float | None:
        """Predicted time to read what is left of one prompt; None if nothing is known of the request or of its cost."""
        entry = self._entries.get(request_id)
        if entry is None or self.cost == StepCost():
            return None
        return self.cost.prefill_seconds(entry.computed, entry.prompt_tokens, self._chunk, entry.reach)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def enter(self, prompts: Mapping[str, int], reach: Reach | None = None) -> None:
        """Let requests wait, given with their prompts' tokens: all of them or none. An empty queue takes any prompts.

        `reach` is what their attention policy lets a query see.

        Raises:
            QueueFullError: they may not; says after how many seconds all prompts that are here should have been read.
        """
        self._check(len(prompts), sum(prompts.values()))
        for request_id, prompt_tokens in prompts.items():
            assert request_id not in self._entries, f"request id {request_id} is in use"
            self._entries[request_id] = _Entry(prompt_tokens, reach)
            self._waiting += 1
            self._waiting_tokens += prompt_tokens

    def progress(self, update: Update) -> None:
        """Note how far a request is; unknown ids are of requests that have left."""
        if (entry := self._entries.get(update.request_id)) is not None:
            self._start(entry)
            entry.computed = update.computed

    def leave(self, request_id: str) -> None:
        """Forget a request, whatever its end was."""
        self._start(self._entries.pop(request_id))

    def _start(self, entry: _Entry) -> None:
        if not entry.started:
            entry.started = True
            self._waiting -= 1
            self._waiting_tokens -= entry.prompt_tokens
