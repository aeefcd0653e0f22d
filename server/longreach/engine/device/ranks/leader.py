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

from longreach.engine.device.ranks.rank_messages import SETTLED, Join, Settle, ToRank, encode
from longreach.engine.device.ranks.settling import Settling
from longreach.engine.errors import DeviceLostError, EngineStartError, not_started
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
    `config.silence_timeout` seconds. With a disk tier, `place_files` name the memory that ranks 1, 2, ... have for
    places.

    Raises:
        EngineStartError: one of them cannot be started; the others have been ended.
    """

    def __init__(self, config: EngineConfig, size: int, on_loss: Callable[[str], None] = end_process) -> None:
        self._silence = config.silence_timeout
        self._on_loss = on_loss
        self._closing = False
        self._connections: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._settling = Settling(size)
        # Files that only these processes can open, and that are gone with them, however they end.
        places = ["longreach-places"] * (size - 1) if config.kv_disk is not None else []
        self._file, *self._place_files = _files(["longreach-rendezvous", *places])
        self.rendezvous = _name(self._file)
        self.place_files = [_name(file) for file in self._place_files]
        for rank in range(1, size):
            try:
                self._start(config, rank)
            except OSError as error:
                self.kill()
                os.close(self._file)  # nobody has joined by its name yet
                raise not_started(f"rank {rank}", error) from error

    def _start(self, config: EngineConfig, rank: int) -> None:
        files = [self._file, *self._place_files[rank - 1 : rank]]
        ours, theirs = socket.socketpair()
        self._connections.append(ours)
        with theirs:
            fd = theirs.fileno()
            command = module_command("longreach.engine.startup.rank_process", str(fd))
            child = subprocess.Popen(command, pass_fds=[fd, *files], env=environment(os.environ))  # noqa: S603
            self._processes.append(child)
        join = Join(config, rank, self.rendezvous, *self.place_files[rank - 1 : rank])
        ours.sendall(encode(join))
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

    def settled(self) -> Callable[[], None]:
        """What waits, in any thread, until all copies are made that these ranks were told to make.

        It raises `DeviceLostError` where one of them is gone before.

        Raises:
            DeviceLostError: one of them is gone.
        """
        wait = self._settling.asked()
        self.send(Settle())
        return wait

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
        for file in self._place_files:
            os.close(file)
        self._place_files = []
        # The file of the rendezvous stays open. torch's store opens it by its name once more when it is collected,
        # whenever that is, and under the name of a descriptor that was closed there may be another file, which it would
        # read and change.

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
        reason = self._until_lost(rank, connection)
        if not self._closing:
            self._on_loss(reason)
        self._settling.lose(reason)  # only where the process goes on

    def _until_lost(self, rank: int, connection: socket.socket) -> str:
        missed, begun = 0, False
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while not self._closing:
            if not poll.poll(HEARTBEAT_SECONDS * 1000):
                missed += begun
                if missed * HEARTBEAT_SECONDS > self._silence:
                    return f"rank {rank} has been silent for {self._silence:.0f} s"
                continue
            missed, begun = 0, True
            heard = _heard(connection)
            if not heard:
                break
            if count := heard.count(SETTLED):
                self._settling.answered(rank, count)
        return f"rank {rank} has ended"


def _heard(connection: socket.socket) -> bytes:
    """What has come; nothing if there will be no more."""
    try:
        return connection.recv(4096)
    except OSError:  # reset, by a process that was killed
        return b""


def _files(names: list[str]) -> list[int]:
    """Descriptors of new files in memory; the names are for people."""
    if not hasattr(os, "memfd_create"):
        raise EngineStartError("several ranks need Linux; leave out --tensor-parallel-size and --context-parallel-size")
    made: list[int] = []
    try:
        for name in names:
            made.append(os.memfd_create(name))
    except OSError as error:
        for file in made:
            os.close(file)
        raise not_started("rank 1", error) from error
    return made


def _name(file: int) -> str:
    """By which a process opens a file that it has a descriptor of."""
    return f"/proc/self/fd/{file}"
