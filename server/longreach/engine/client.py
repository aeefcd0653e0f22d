"""The owner's side of the engine process: send it requests, hand each caller its own updates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

from longreach.engine.admission import Admission, Place, most_queued_tokens
from longreach.engine.engine_connection import EngineConnection
from longreach.engine.errors import (
    EngineDeadError,
    EngineError,
    EngineStartError,
    RequestFailedError,
    SlowReaderError,
)
from longreach.engine.lookouts import Lookouts
from longreach.engine.looks import Look, Looked
from longreach.engine.messages import (
    HEARTBEAT_SECONDS,
    Cancel,
    EngineConfig,
    Failed,
    FromEngine,
    Generate,
    Heartbeat,
    Pin,
    Started,
    StartFailed,
    Unpin,
)
from longreach.engine.stats import Stats
from longreach.engine.unread import MOST_OF_ALL, Unread
from longreach.engine.updates import Update, Updates
from longreach.policies.values import DENSE, AttentionPolicy
from longreach.util.shared_bytes import SharedBytes

logger = logging.getLogger(__name__)

_KILL_AFTER_SECONDS = 10.0
_ENDING_SECONDS = 2.0  # for a process that has closed its socket unasked: its requests are waiting to be told
# An engine of which nothing was heard for so many heartbeats does not respond.
_MISSED_BEATS = 6


class EngineClient:
    """A running engine process, as seen from the event loop that started it.

    `info` holds what the engine said when it became ready, `stats` what it said last. `on_death` is called once if the
    process ends without having been asked to. A process that shows no sign of life for `config.silence_timeout`
    seconds, or computes one step for longer than `config.step_timeout`, is killed: its requests would never end.
    """

    def __init__(
        self,
        config: EngineConfig,
        connection: EngineConnection,
    ) -> None:
        self._config = config
        self._connection = connection
        self._inboxes: dict[str, Unread] = {}
        self._unread = SharedBytes(MOST_OF_ALL)
        self._stopping = False
        self._dead = False
        self._tasks: list[asyncio.Task[None]] = []
        self._missed_beats = 0
        self.stats = Stats()
        self.info: Started
        self._admission: Admission
        self._lookouts: Lookouts | None = None
        self.on_death: Callable[[], None] | None = None

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineClient:
        """Start the process and wait until it is ready.

        Raises:
            HostShortageError: there are no descriptors, or other things that a process takes, at this moment.
            EngineStartError: the model could not be loaded, or nothing fits; the message is the operator's.
        """
        connection = await EngineConnection.start()
        client = cls(config, connection)
        try:
            await connection.send(config)
            answer = await connection.receive()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await client.stop()
            hint = "; memory may have run out, the machine's or the container's" if connection.killed else ""
            raise EngineStartError(f"the engine process ended during start ({connection.end}){hint}") from error
        except asyncio.CancelledError:
            await client.stop()
            raise
        if isinstance(answer, StartFailed):
            await client.stop()
            raise EngineStartError(answer.message)
        assert isinstance(answer, Started), answer
        client.info = answer
        client._admission = Admission(
            config.max_queued_requests,
            most_queued_tokens(config.max_queued_tokens, answer.kv_tokens),
            answer.max_batched_tokens,
            shares_prompts=config.prefix_cache,
        )
        client._lookouts = Lookouts(answer, connection.send)
        client._tasks = [
            asyncio.create_task(client._listen(), name="engine-listener"),
            asyncio.create_task(client._watch(), name="engine-watch"),
        ]
        return client

    @property
    def alive(self) -> bool:
        """Whether the process runs and is reachable."""
        return not self._dead and not self._stopping and self._connection.runs

    @property
    def responsive(self) -> bool:
        """Whether the process has given a sign of life of late; a long step does not keep it from that."""
        return self._missed_beats < _MISSED_BEATS

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._connection.pid

    @property
    def requests_in_flight(self) -> int:
        """Requests that have been sent and have not ended."""
        return len(self._inboxes)

    @property
    def unread_tokens(self) -> int:
        """Prompt tokens that were sent to the engine, or are about to be, and are not computed yet."""
        return self._admission.unread_tokens

    def admit(
        self,
        places: Mapping[str, Place],
        attention: AttentionPolicy = DENSE,
        caller: str = "",
        *,
        again: bool = False,
    ) -> None:
        """Take a place in the queue for each request, by its id: for all of them or for none. They are of one caller
        and of one attention policy. Those that an engine before this one had taken come `again`, and find room.

        Whoever admits requests gives their places back by `release`, at the end of each or of all of them.

        Raises:
            QueueFullError: too much is waiting.
        """
        visible = attention.visible().beside_dense(self.info.dense_share)
        self._admission.enter(places, visible, caller, again=again)

    def release(self, request_ids: Iterable[str]) -> None:
        """Give back the places of requests, as far as they still have any."""
        for request_id in request_ids:
            if request_id in self._admission:
                self._admission.leave(request_id)

    def seconds_to_read(self, request_id: str) -> float | None:
        """Predicted time to read the rest of a prompt, if nobody else's is read; None before the first steps, 0 for
        all but the first of the requests that share it."""
        return self._admission.seconds_to_read(request_id)

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
        """What a request would get from the caches now, and when its first token would come. It changes nothing.

        The engine answers between two steps.

        Raises:
            EngineDeadError: the engine process is gone.
        """
        if not self.alive or self._lookouts is None:
            raise EngineDeadError("the engine process is not running")
        question = Look(
            look_id=0,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            answers=answers,
            priority=priority,
            flexible=flexible,
            attention=attention,
            rope_factor=rope_factor,
        )
        return await self._lookouts.look(question, prompt, cache_salt, caller)

    async def generate(self, request: Generate) -> AsyncGenerator[Update, None]:
        """Yield the updates of one request, which has a place by `admit`, until it has finished.

        Closing the generator early (a caller that goes away) cancels the request in the engine.

        Raises:
            RequestFailedError: this request failed.
            SlowReaderError: too many of its updates were not taken.
            EngineDeadError: the engine process is gone.
        """
        self._require_alive()
        assert request.request_id not in self._inboxes, f"request id {request.request_id} is in use"
        assert request.request_id in self._admission, f"request {request.request_id} has no place; call `admit` first"
        inbox = Unread(request.caller, self._unread)
        self._inboxes[request.request_id] = inbox
        finished = False
        try:
            await self._send(request)
            while not finished:
                update = await inbox.get()
                finished = update.finish_reason is not None
                yield update
        except EngineError:
            finished = True
            raise
        finally:
            inbox.close()
            self._inboxes.pop(request.request_id, None)
            if not finished and self.alive:
                self._connection.write(Cancel(request.request_id))

    async def pin(
        self,
        name: str,
        prompt: list[int],
        cache_salt: str = "",
        attention: AttentionPolicy = DENSE,
        rope_factor: float = 0.0,
    ) -> None:
        """Have what is cached of a prompt evicted last, until `unpin`, in place of what this name has pinned before.

        It is a preference, which is the engine's memory only: send it again whenever an engine has started. Without a
        prefix cache nothing is cached that could be pinned.

        Raises:
            EngineDeadError: the engine process is gone.
        """
        await self._send(Pin(name, prompt, cache_salt, attention, rope_factor))

    async def unpin(self, name: str) -> None:
        """End a pin, if there is one of this name.

        Raises:
            EngineDeadError: the engine process is gone.
        """
        await self._send(Unpin(name))

    async def stop(self) -> None:
        """End the process by closing its socket, and if that does not do, by force. Open requests get an error."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await self._connection.close(_KILL_AFTER_SECONDS)
        self._fail_all("the server is shutting down")

    async def _send(self, message: Generate | Pin | Unpin) -> None:
        self._require_alive()
        try:
            await self._connection.send(message)
        except ConnectionError as error:  # it has ended, and the listener does not know it yet
            raise EngineDeadError("the engine process is not running") from error

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError("the engine process is not running")

    async def _listen(self) -> None:
        try:
            while True:
                message = await self._connection.receive()
                self._missed_beats = 0
                self._deliver(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process has ended, or is about to
        except Exception:  # nothing that it says could be understood from here on
            logger.exception("the engine process sent what cannot be understood; it is killed")
            self._connection.kill()
        self._dead = True
        await self._connection.end_within(_ENDING_SECONDS)
        self._fail_all(f"the engine process ended unexpectedly ({self._connection.end})")
        if self.on_death is not None and not self._stopping:
            self.on_death()

    async def _watch(self) -> None:
        """Count the heartbeats that did not come, and kill a process that hangs.

        Turns of this loop are counted, not seconds: while the event loop itself is late, so is its news of the engine.
        """
        while not self._dead:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._missed_beats += 1
            if self._missed_beats * HEARTBEAT_SECONDS > self._config.silence_timeout:
                self._kill(f"has been silent for {self._config.silence_timeout:.0f} s")
                return

    def _kill(self, why: str) -> None:
        if self._connection.runs:
            logger.error("the engine process %s; it is killed", why)
            self._connection.kill()  # the listener sees the end of it

    def _deliver(self, message: FromEngine) -> None:
        # An id that is not in the table belongs to a caller that went away while its last tokens were on the wire.
        if isinstance(message, Updates):
            if message.cost is not None:
                self._admission.cost = message.cost
            for update in message.updates:
                self._admission.progress(update)
                if inbox := self._inboxes.get(update.request_id):
                    try:
                        inbox.put(update)
                    except SlowReaderError:
                        del self._inboxes[update.request_id]
                        self._connection.write(Cancel(update.request_id))
        elif isinstance(message, Heartbeat):
            self.stats = message.stats
            if message.step_seconds > self._config.step_timeout:
                self._kill(f"has computed one step for {message.step_seconds:.0f} s")
        elif isinstance(message, Failed):
            if inbox := self._inboxes.get(message.request_id):
                inbox.fail(RequestFailedError(message.message, message.kind))
        elif isinstance(message, Looked):
            assert self._lookouts is not None
            self._lookouts.deliver(message)
        else:
            raise AssertionError(f"{type(message).__name__} is only sent during start")

    def _fail_all(self, reason: str) -> None:
        for inbox in self._inboxes.values():
            inbox.fail(EngineDeadError(reason))
        if self._lookouts is not None:
            self._lookouts.fail(reason)
