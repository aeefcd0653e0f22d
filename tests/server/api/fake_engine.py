"""An engine without a model: same surface as `EngineClient`, in process, with every stage under the test's control."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

import msgspec
from longreach.engine.admission import Admission, Place
from longreach.engine.errors import EngineDeadError, QueueFullError, RequestFailedError
from longreach.engine.looks import Looked
from longreach.engine.messages import EngineConfig, Generate, Started
from longreach.engine.stats import Stats
from longreach.engine.updates import AttendedBlocks, Logprob, Update
from longreach.policies.values import DENSE, AttentionPolicy

EOS_ID = 1

log = logging.getLogger(__name__)


def started(max_model_len: int = 65536, vocab_size: int = 400) -> Started:
    """What a small engine says when it is ready."""
    return Started(
        max_model_len=max_model_len,
        max_batched_tokens=64,
        kv_tokens=4 * max_model_len,
        page_size=64,
        page_bytes=1000,
        host_kv_tokens=64 * 32,
        host_bytes=32_000,
        vocab_size=vocab_size,
        eos_token_ids=[EOS_ID],
        model_type="llama",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        attention_backend="reference",
        backend_reason="a test",
        load_seconds=0.1,
        state_bytes=100_000,
        attended_layers=2,
        start_phases={"load weights": 0.1},
    )


class EchoEngine:
    """Answers a prompt with its own tokens (without BOS), then EOS, or with `answer(request)`.

    `hold_prefill` stops every request after its first chunk of prompt, `hold_decode_after` after so many tokens; both
    may be set from another thread, which is why they are polled. `failure` is raised in place of the next token, `full`
    in place of taking a request; `cached` is said to have been cached of each prompt, and of that `tiers` in host
    memory and on disk. `admission` counts what waits; nobody reaches its bounds unless a test sets others. An update
    has `burst` tokens, as with speculation. Of requests that ask, a token attended to what `attends(request, count)`
    says, the count being 1 for the first.
    """

    def __init__(self, info: Started | None = None, prefill_chunk: int = 8) -> None:
        self.info = started() if info is None else info
        self.stats = Stats(
            pages=64,
            free_pages=48,
            cached_pages=8,
            host_pages=32,
            used_host_pages=20,
            state_slots=16,
            free_state_slots=5,
            state_copies=7,
            host_state_copies=3,
            stored_pages=30,
            restored_pages=5,
            stored_states=4,
            restored_states=2,
            causal_pairs=100,
            computed_pairs=40,
            compiled_beside={"forward_kernel": 2},
        )
        self.on_death: Callable[[], None] | None = None
        self.answer: Callable[[Generate], list[int]] = lambda request: [token for token in request.prompt if token]
        self.attends: Callable[[Generate, int], AttendedBlocks] = lambda request, count: AttendedBlocks()
        self.hold_prefill = False
        self.hold_decode_after: int | None = None
        self.failure: Exception | None = None
        self.requests: list[Generate] = []
        self.cached = 0
        self.tiers: tuple[int, int] = (0, 0)
        self.burst = 1
        self.waited = 0.0
        self.full: QueueFullError | None = None
        self.admission = Admission(10**6, 10**9, 64)
        self.places: set[str] = set()
        self.callers: list[str] = []
        self.looked: Looked | None = None
        self.looks: list[tuple[list[int], str, AttentionPolicy]] = []
        self.look_factors: list[float] = []
        self.pin_factors: list[float] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.pins: dict[str, tuple[list[int], str, AttentionPolicy]] = {}
        self.stopped = False
        self.stalled = False
        self._prefill_chunk = prefill_chunk
        self._dead = False

    @classmethod
    async def start(cls, config: EngineConfig) -> EchoEngine:
        """As `EngineClient.start`."""
        return cls()

    @property
    def alive(self) -> bool:
        """As `EngineClient.alive`."""
        return not self._dead and not self.stopped

    @property
    def responsive(self) -> bool:
        """As `EngineClient.responsive`."""
        return not self.stalled

    @property
    def unread_tokens(self) -> int:
        """As `EngineClient.unread_tokens`; it reads prompts at once."""
        return 0

    def admit(
        self,
        places: Mapping[str, Place],
        attention: AttentionPolicy = DENSE,
        caller: str = "",
        *,
        again: bool = False,
    ) -> None:
        """As `EngineClient.admit`; there is room for what the ledger has room for, or for nothing more."""
        if self.full is not None:
            raise self.full
        self.admission.enter(places, caller=caller, again=again)
        self.places |= places.keys()
        self.callers.append(caller)

    def release(self, request_ids: Iterable[str]) -> None:
        """As `EngineClient.release`."""
        for request_id in self.places & set(request_ids):
            self.places.remove(request_id)
            self.admission.leave(request_id)

    def seconds_to_read(self, request_id: str) -> float | None:
        """As `EngineClient.seconds_to_read`: a minute."""
        return 60.0

    async def pin(
        self,
        name: str,
        prompt: list[int],
        cache_salt: str = "",
        attention: AttentionPolicy = DENSE,
        rope_factor: float = 0.0,
    ) -> None:
        """As `EngineClient.pin`."""
        self.pins[name] = (prompt, cache_salt, attention)
        self.pin_factors.append(rope_factor)

    async def unpin(self, name: str) -> None:
        """As `EngineClient.unpin`."""
        self.pins.pop(name, None)

    async def look(
        self,
        prompt: Sequence[int],
        cache_salt: str = "",
        attention: AttentionPolicy = DENSE,
        rope_factor: float = 0.0,
        *,
        max_tokens: int = 1,
        answers: int = 1,
        priority: int = 0,
        flexible: bool = False,
        caller: str = "",
    ) -> Looked:
        """As `EngineClient.look`: what `cached` and `tiers` say, or `looked` if a test sets that."""
        if not self.alive:
            raise EngineDeadError("the engine process is not running")
        self.looks.append((list(prompt), cache_salt, attention))
        self.look_factors.append(rope_factor)
        if self.looked is not None:
            return msgspec.structs.replace(self.looked, total=len(prompt))
        host, disk = self.tiers
        return Looked(look_id=0, total=len(prompt), gpu=self.cached - host - disk, host=host, disk=disk)

    async def generate(self, request: Generate) -> AsyncGenerator[Update, None]:
        """As `EngineClient.generate`."""
        if not self.alive:
            raise EngineDeadError("the engine process is not running")
        self.requests.append(request)
        self.running.add(request.request_id)
        log.info("engine took request %d", len(self.requests))
        finished = False
        try:
            async for update in self._updates(request):
                finished = update.finish_reason is not None
                self.admission.progress(update)
                yield update
        except (EngineDeadError, RequestFailedError):
            finished = True
            raise
        finally:
            self.running.remove(request.request_id)
            if not finished:
                self.cancelled.append(request.request_id)

    async def stop(self) -> None:
        """As `EngineClient.stop`."""
        self.stopped = True

    def die(self) -> None:
        """End as a killed process does: open requests fail, then the owner is told. Call it in the event loop."""
        self._dead = True
        assert self.on_death is not None
        self.on_death()

    async def _updates(self, request: Generate) -> AsyncGenerator[Update, None]:
        n = len(request.prompt)
        for computed in range(self._prefill_chunk, n, self._prefill_chunk):
            yield Update(request_id=request.request_id, prompt_tokens=n, computed=computed, waited=self.waited)
            await self._while(lambda: self.hold_prefill)
        await self._while(lambda: self.hold_prefill)
        ends = request.stop_token_ids[:1]
        answer = self.answer(request)
        tokens = (
            itertools.chain(answer, ends) if ends and len(answer) >= request.min_tokens else itertools.cycle(answer)
        )
        burst: list[int] = []
        for count, token in enumerate(tokens, start=1):
            if count <= len(request.drawn):
                continue
            await self._while(lambda done=count: self.hold_decode_after is not None and done > self.hold_decode_after)
            if self.failure is not None:
                raise self.failure
            finish = "stop" if token in request.stop_token_ids else "length" if count == request.max_tokens else None
            burst.append(token)
            if finish is None and len(burst) < self.burst:
                continue
            yield Update(
                request_id=request.request_id,
                prompt_tokens=n,
                computed=n,
                cached=self.cached,
                cached_host=self.tiers[0],
                cached_disk=self.tiers[1],
                tokens=burst,
                finish_reason=finish,
                waited=self.waited,
                logprobs=[] if request.logprobs is None else [_logprob(one, request.logprobs) for one in burst],
                prompt_logprobs=_prompt_logprobs(request) if count <= self.burst else [],
                attended=[self.attends(request, count - len(burst) + i + 1) for i in range(len(burst))]
                if request.places
                else [],
            )
            burst = []
            if finish is not None:
                return

    async def _while(self, held: Callable[[], bool]) -> None:
        await asyncio.sleep(0)
        while held() and not self._dead:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        if self._dead:
            raise EngineDeadError("the engine process ended unexpectedly (exit status -9)")


def _logprob(token: int, top: int) -> Logprob:
    """A made-up score: the token itself is the likeliest, then 5, 6, ..."""
    others = [other for other in range(5, 5 + top) if other != token][: max(top - 1, 0)]
    likeliest = [token, *others][:top]
    return Logprob(token, -token / 100, likeliest, [-token / 100 - i for i in range(len(likeliest))])


def _prompt_logprobs(request: Generate) -> list[Logprob]:
    if request.prompt_logprobs is None:
        return []
    return [_logprob(token, request.prompt_logprobs) for token in request.prompt[1:]]
