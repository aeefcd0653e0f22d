"""Which requests may wait: the owner's ledger of what it has sent to the engine, and how long that will take to read.

That a request fits is known before it is sent (`Started.max_model_len`); whether there is room in the queue is decided
here, at once and without asking the engine, which is busy with a step. Requests of one prompt read it once: the first
computes its pages, and the others take them from the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from longreach.engine.cost_model import StepCost
from longreach.engine.errors import QueueFullError
from longreach.engine.updates import Update
from longreach.policies.visible import Visible

# Unless told otherwise, prompts may wait that fill the KV cache so many times.
_QUEUED_CACHES = 4
# When a bound is reached, callers may still enter who then hold at most the first part of it, up to the second beyond.
_OWN_SHARE = 1 / 8
_RESERVE = 1 / 4


def most_queued_tokens(asked: int | None, kv_tokens: int) -> int:
    """Prompt tokens that may wait: as many as were `asked` for, or what the KV cache holds, several times."""
    return _QUEUED_CACHES * kv_tokens if asked is None else asked


@dataclass(frozen=True)
class Place:
    """A request that wants to wait: its prompt's tokens, and the request of the same `enter` whose prompt it shares.

    Requests share a prompt whose pages each would take from the prefix cache: equal tokens, salt and attention policy.
    None where it is the first to read its prompt.
    """

    prompt_tokens: int
    copy_of: str | None = None


@dataclass(eq=False)
class _Prompt:
    """A prompt that is read once. `computed` of its tokens are; `members` are the requests that share it, and are here.
    It waits until one of them has `started`."""

    tokens: int
    visible: Visible | None
    computed: int = 0
    started: bool = False
    shared: bool = False
    members: list[str] = field(default_factory=list)

    @property
    def unread(self) -> int:
        return self.tokens - self.computed


@dataclass(eq=False)
class _Waiting:
    """What somebody has waiting."""

    requests: int = 0
    tokens: int = 0


@dataclass(eq=False)
class _Entry:
    prompt: _Prompt
    caller: str
    started: bool = False


class Admission:
    """Bounds on the requests that wait, in number and in prompt tokens.

    A request waits from `enter`, before it is sent, to its first update or to `leave`; its prompt's tokens, to the
    first update of one that shares the prompt. `cost` is what the engine last said a step costs; `chunk` the tokens
    that it reads in one. Without a prefix cache (`shares_prompts`) every copy is read, and counts.

    A bound is for all callers together. Beyond it there is a reserve of a quarter, for callers who have at most an
    eighth of the bound waiting: one caller alone cannot keep all others out.
    """

    def __init__(self, max_requests: int, max_tokens: int, chunk: int, *, shares_prompts: bool = True) -> None:
        self.cost = StepCost()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._chunk = chunk
        self._shares_prompts = shares_prompts
        self._entries: dict[str, _Entry] = {}
        self._prompts: dict[_Prompt, None] = {}
        self._all = _Waiting()
        self._of_callers: dict[str, _Waiting] = {}

    @property
    def waiting_requests(self) -> int:
        """Requests of which nothing has been computed yet."""
        return self._all.requests

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts of which nothing has been computed yet."""
        return self._all.tokens

    @property
    def unread_tokens(self) -> int:
        """Prompt tokens of all requests that are not computed yet."""
        return sum(prompt.unread for prompt in self._prompts)

    def _check(self, caller: str, requests: int, prompts: Sequence[int]) -> None:
        tokens, own = sum(prompts), self._of_callers.get(caller, _Waiting())
        few = self._all.requests + requests <= self._max_requests
        # One prompt that is longer than the bound would otherwise never be taken.
        short = self._all.tokens + tokens <= self._max_tokens or (not self._all.requests and len(prompts) == 1)
        if (few and short) or self._in_reserve(own, requests, tokens):
            return
        raise QueueFullError(
            f"{self._all.requests} requests with {self._all.tokens} prompt tokens are waiting already; this server "
            f"lets {self._max_requests} requests and {self._max_tokens} tokens wait",
            retry_after=max(1, math.ceil(self.prefill_seconds())),
        )

    def _in_reserve(self, own: _Waiting, requests: int, tokens: int) -> bool:
        """Whether a caller who has `own` waiting may have so much more although a bound is reached."""

        def fits(own: int, waiting: int, more: int, bound: int) -> bool:
            share, reserve = max(1, int(bound * _OWN_SHARE)), max(1, int(bound * _RESERVE))
            return own + more <= share and waiting + more <= bound + reserve

        return fits(own.requests, self._all.requests, requests, self._max_requests) and fits(
            own.tokens, self._all.tokens, tokens, self._max_tokens
        )

    def prefill_seconds(self) -> float:
        """Predicted time to read what is left of all prompts."""
        return sum(self._seconds(prompt) for prompt in self._prompts)

    def seconds_to_read(self, request_id: str) -> float | None:
        """Predicted time to read what is left of one prompt; None if nothing is known of the request or of its cost.

        0 where another request reads the prompt.
        """
        entry = self._entries.get(request_id)
        if entry is None or self.cost == StepCost():
            return None
        return self._seconds(entry.prompt) if entry.prompt.members[0] == request_id else 0.0

    def _seconds(self, prompt: _Prompt) -> float:
        if not prompt.unread:
            return 0.0
        return self.cost.prefill_seconds(prompt.computed, prompt.tokens, self._chunk, prompt.visible)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def enter(
        self, places: Mapping[str, Place], visible: Visible | None = None, caller: str = "", *, again: bool = False
    ) -> None:
        """Let requests of one `caller` wait, by their ids: all of them or none. An empty queue takes any one prompt.

        `visible` is what their attention policy lets a query see. Those that an engine before this one had taken come
        `again`: there is room for them.

        Raises:
            QueueFullError: they may not; says after how many seconds all prompts that are here should have been read.
        """
        readers = {name: (place.copy_of if self._shares_prompts else None) or name for name, place in places.items()}
        lengths = {name: places[name].prompt_tokens for name, reader in readers.items() if name == reader}
        if not again:
            self._check(caller, len(places), [*lengths.values()])
        prompts = {name: _Prompt(tokens, visible) for name, tokens in lengths.items()}
        for name, reader in readers.items():
            assert name not in self._entries, f"request id {name} is in use"
            prompt = prompts[reader]
            prompt.members.append(name)
            prompt.shared = len(prompt.members) > 1
            self._entries[name] = _Entry(prompt, caller)
        self._prompts |= dict.fromkeys(prompts.values())
        self._count(caller, len(places), sum(lengths.values()))

    def progress(self, update: Update) -> None:
        """Note how far a request is; unknown ids are of requests that have left."""
        if (entry := self._entries.get(update.request_id)) is not None:
            self._start(entry)
            # One that is preempted reads its prompt again. Of several that share one, the furthest counts.
            done = entry.prompt.computed if entry.prompt.shared else 0
            entry.prompt.computed = max(update.computed, done)

    def leave(self, request_id: str) -> None:
        """Forget a request, whatever its end was. Its prompt is forgotten with the last that shares it."""
        entry = self._entries.pop(request_id)
        entry.prompt.members.remove(request_id)
        self._start(entry, reads=not entry.prompt.members)
        if not entry.prompt.members:
            del self._prompts[entry.prompt]

    def _start(self, entry: _Entry, *, reads: bool = True) -> None:
        """A request waits no more, nor does its prompt, unless it left that to others."""
        if not entry.started:
            entry.started = True
            self._count(entry.caller, -1, 0)
        if reads and not entry.prompt.started:
            entry.prompt.started = True
            self._count(entry.caller, 0, -entry.prompt.tokens)

    def _count(self, caller: str, requests: int, tokens: int) -> None:
        own = self._of_callers.setdefault(caller, _Waiting())
        for waiting in (self._all, own):
            waiting.requests += requests
            waiting.tokens += tokens
        if not own.requests and not own.tokens:
            del self._of_callers[caller]
