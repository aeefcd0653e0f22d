"""A rank of an engine other than the first: `python -m longreach.engine.startup.rank_process FD`.

Only `device.ranks.leader` starts it.
It computes what rank 0 computes, on its own part of the model. It ends when its socket closes, when anything goes
wrong, and by the kernel's hand if its parent dies.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from longreach.engine.device.ranks.rank_messages import BEAT, SETTLED, Compute, Join, Move, Settle, receive
from longreach.engine.messages import HEARTBEAT_SECONDS
from longreach.util.child_process import belong_to_parent, end
from longreach.util.log_lines import configure_logging
from longreach.util.memory import settle_garbage

if TYPE_CHECKING:
    from longreach.engine.device.forward_pass import ForwardPass

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 10.0


def main() -> None:
    """Serve rank 0 over the inherited socket whose file descriptor is the only argument."""
    belong_to_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    first = receive(connection)
    if first is None:
        return
    assert isinstance(first, Join), f"expected to be told a rank first, got {type(first).__name__}"
    configure_logging("info", first.config.log_format, f"rank {first.rank}")
    try:
        computing = _start(first)
    except Exception:
        logger.critical("rank %d cannot start", first.rank, exc_info=True)
        # What stops this rank most often stops rank 0, too, which then says so and ends this one; else it ends itself.
        connection.settimeout(_LAST_WORDS_SECONDS)
        with contextlib.suppress(OSError):
            receive(connection)
        end(1)
    try:
        _serve(connection, computing)
    except Exception:  # whatever it was, the other ranks wait for this one until it is gone
        logger.critical("rank %d ends", first.rank, exc_info=True)
        end(1)
    end(0)


def _start(first: Join) -> ForwardPass:
    from longreach.engine.device.ranks.process_group import join, on_rank  # torch takes seconds to import
    from longreach.engine.startup.disk import tell_digest
    from longreach.engine.startup.start_rank import share_threads, start_rank

    config = on_rank(first.config, first.rank)
    joined = join(config, first.rank, first.rendezvous)
    share_threads(joined.layout)
    computing = start_rank(config, joined, first.place_file).forward
    if config.kv_disk is not None:
        tell_digest(computing, joined)
    return computing


def _serve(connection: socket.socket, computing: ForwardPass) -> None:
    from longreach.engine.device.ranks.process_group import leave

    settle_garbage()
    threading.Thread(target=_beat, args=(connection,), name="heartbeat", daemon=True).start()
    copies: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    threading.Thread(target=_settle, args=(connection, copies), name="settling", daemon=True).start()
    while (message := receive(connection)) is not None:
        if isinstance(message, Compute):
            computing.logits(message.batch)
        elif isinstance(message, Move):
            computing.move(message.moves)
        elif isinstance(message, Settle):
            assert computing.host is not None, "copies go to host memory, and there is none"
            copies.put(computing.host.settled())
        else:
            raise AssertionError(f"unexpected {type(message).__name__}")
    computing.close()
    leave()


def _beat(connection: socket.socket) -> None:
    while True:
        try:
            connection.sendall(BEAT)
        except OSError:
            return  # rank 0 is gone; the main thread sees it too
        time.sleep(HEARTBEAT_SECONDS)


def _settle(connection: socket.socket, copies: queue.SimpleQueue[Callable[[], object]]) -> None:
    """Wait for copies, one after the other, and say that they are made."""
    while True:
        settled = copies.get()
        try:
            settled()
        except Exception:  # a device's: the other ranks wait for this one until it is gone
            logger.critical("copies to or from host memory failed", exc_info=True)
            end(1)
        try:
            connection.sendall(SETTLED)
        except OSError:
            return  # as in `_beat`


if __name__ == "__main__":
    main()
