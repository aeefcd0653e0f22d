"""Rank 0's hold on the other ranks of its engine: start them, tell them what to compute, see that they live.

A step is computed by all ranks or by none: one that is lost leaves the others waiting in a sum that never ends. So the
engine ends with any of its ranks, and whoever owns it starts another.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable

from longreach.engine.device.ranks.rank_messages import Join, ToRank, encode
from longreach.engine.errors import DeviceLostError, not_started
from longreach.engine.messages import HEARTBEAT_SECONDS, EngineConfig
from longreach.util.child_process import EXIT_DEVICE_LOST, end
from longreach.util.safe_path import environment, module_command

logger = logging.getLogger(__name__)

# Ranks that were asked to end have so long for it.
_ENDING_SECONDS = 3.0


def end_process(reason: str) -> None:
    """End this process at once: an orderly end would wait for a device that waits for the rank that is lost."""
    logger.critical("%s; the engine ends", reason)
    end(EXIT_DEVICE_LOST)


class Ranks:
    """The processes of ranks 1 to `size` - 1, children of this one; made in its main thread.

    `on_loss` is called, in another thread, with the reason when one of them has ended, or has given no sign of life for
    `config.silence_timeout` seconds.

    Raises:
        EngineStartError: one of them cannot be started; the others have been ended.
    """

    def __init__(self, config: EngineConfig, size: int, on_loss: Callable[[str], None] = end_process) -> None:
        self._silence = config.silence_timeout
        self._on_loss = on_loss
        self._closing = False
        self._connections: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            # A file that only these processes can open, and that is gone with them, however they end.
            self._file = os.memfd_create("longreach-rendezvous")
        except OSError as error:
            raise not_started("rank 1", error) from error
        self.rendezvous = f"/proc/self/fd/{self._file}"
        for rank in range(1, size):
            try:
                self._start(config, rank)
            except OSError as error:
                self.kill()
                os.close(self._file)  # nobody has joined by its name yet
                raise not_started(f"rank {rank}", error) from error

    def _start(self, config: EngineConfig, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(ours)
        with theirs:
            fd = theirs.fileno()
            command = module_command("longreach.engine.startup.rank_process", str(fd))
            child = subprocess.Popen(command, pass_fds=[fd, self._file], env=environment(os.environ))  # noqa: S603
            self._processes.append(child)
        ours.sendall(encode(Join(config, rank, self.rendezvous)))
        threading.Thread(target=self._watch, args=(rank, ours), name=f"rank-{rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    def send(self, message: ToRank) -> None:
        """Tell all of them.

        Raises:
            DeviceLostError: one of them is gone.
        """
        frame = encode(message)
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.sendall(frame)
            except OSError as error:
                raise DeviceLostError(f"rank {rank} cannot be reached ({error})") from error

    def dismiss(self) -> None:
        """Tell them that there is nothing more to compute."""
        self._closing = True
        for connection in self._connections:
            connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wait for the end of those that were dismissed, and end by force those that do not."""
        for process in self._processes:
            try:
                process.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        # The file stays open. torch's store opens it by its name once more when it is collected, whenever that is, and
        # under the name of a descriptor that was closed there may be another file, which it would read and change.

    def kill(self) -> None:
        """End them at once, whatever they do."""
        self._closing = True
        for process in self._processes:
            process.kill()
        self.close()

    def _watch(self, rank: int, connection: socket.socket) -> None:
        """Count the heartbeats that did not come, from the first one on: until then a rank loads its weights.

        Turns are counted, not seconds: a machine that slept has missed one.
        """
        missed, begun = 0, False
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while not self._closing:
            if not poll.poll(HEARTBEAT_SECONDS * 1000):
                missed += begun
                if missed * HEARTBEAT_SECONDS > self._silence:
                    self._on_loss(f"rank {rank} has been silent for {self._silence:.0f} s")
                    return
                continue
            missed, begun = 0, True
            if not _heard(connection):
                if not self._closing:
                    self._on_loss(f"rank {rank} has ended")
                return


def _heard(connection: socket.socket) -> bool:
    """Take what has come; whether there may be more."""
    try:
        return bool(connection.recv(4096))
    except OSError:  # reset, by a process that was killed
        return False
