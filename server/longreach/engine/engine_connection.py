"""The engine process as its owner holds it: how it is started, what is sent and received, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping

from longreach.engine.errors import not_started
from longreach.engine.messages import (
    LENGTH_BYTES,
    FromEngine,
    ToEngine,
    encode_frame,
    frame_length,
    from_engine_decoder,
)
from longreach.util.descriptors import require_descriptors
from longreach.util.safe_path import environment, module_command


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An engine's environment, from its owner's.

    OpenMP's threads wait for each other in a loop of some milliseconds before they sleep. With a busy neighbour on the
    same cores they wait for a thread that is not running, at every product: on two cores a token of the embedded
    model then took 156 ms in place of 7. After a shorter loop it is 20, and 9 without the neighbour.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys()
    return {**environment} if chosen else {**environment, "GOMP_SPINCOUNT": "5000"}


class EngineConnection:
    """A child process and the socket to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> EngineConnection:
        """Start the process, which waits for its configuration.

        Raises:
            HostShortageError: there are no descriptors, or other things that a process takes, at this moment.
            EngineStartError: it cannot be started for another reason.
        """
        try:
            require_descriptors()
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise not_started("the engine process", error) from error
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *module_command("longreach.engine.startup.engine_process", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    env=environment(child_environment(os.environ)),
                )
            except OSError as error:
                ours.close()
                raise not_started("the engine process", error) from error
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the process has not ended, as far as is known."""
        return self._process.returncode is None

    @property
    def killed(self) -> bool:
        """Whether somebody has killed it, such as a system without memory."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def end(self) -> str:
        """How the process ended, for people."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"

    async def send(self, message: ToEngine) -> None:
        """Send a message, and wait where much waits to be sent."""
        self.write(message)
        await self._writer.drain()

    def write(self, message: ToEngine) -> None:
        """Send a short message without waiting."""
        self._writer.write(encode_frame(message))

    async def receive(self) -> FromEngine:
        """The next message.

        Raises:
            asyncio.IncompleteReadError, ConnectionError: there is none, since the process has ended.
        """
        header = await self._reader.readexactly(LENGTH_BYTES)
        return from_engine_decoder.decode(await self._reader.readexactly(frame_length(header)))

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    async def close(self, seconds: float) -> None:
        """Close the socket, at which the process ends; by force if not within `seconds`."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the peer may have gone first
            await self._writer.wait_closed()
        await self.end_within(seconds)

    async def end_within(self, seconds: float) -> None:
        """Wait for the process, whose socket is closed, to end, and kill it if it does not.

        A signal to a process that is ending may take its exit status away from asyncio, so that how it ended is lost.
        """
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
