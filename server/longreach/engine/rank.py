"""A rank of an engine other than the first: `python -m longreach.engine.rank FD`, started by `ranks.Ranks` alone.

It computes what rank 0 computes, on its own part of the model. It ends when its socket closes, when anything goes
wrong, and by the kernel's hand if its parent dies.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time

from longreach.garbage import settle_garbage

from .child import belong_to_parent
from .messages import HEARTBEAT_SECONDS
from .rank_messages import BEAT, Compute, Join, Move, receive

logger = logging.getLogger(__name__)


def main() -> None:
    """Serve rank 0 over the inherited socket whose file descriptor is the only argument."""
    belong_to_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    first = receive(connection)
    if first is None:
        return
    assert isinstance(first, Join), f"expected to be told a rank first, got {type(first).__name__}"
    form = f"%(asctime)s %(levelname)s rank {first.rank}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    try:
        _serve(connection, first)
    except Exception:  # whatever it was, the other ranks wait for this one until it is gone
        logger.critical("rank %d ends", first.rank, exc_info=True)
        _exit(1)
    _exit(0)


def _serve(connection: socket.socket, first: Join) -> None:
    from .joining import join, leave, on_rank  # torch takes seconds to import
    from .parts import build_parts, share_threads

    config = on_rank(first.config, first.rank)
    joined = join(config, first.rank, first.rendezvous)
    share_threads(joined.layout)
    computing = build_parts(config, joined).forward
    settle_garbage()
    threading.Thread(target=_beat, args=(connection,), name="heartbeat", daemon=True).start()
    while (message := receive(connection)) is not None:
        if isinstance(message, Compute):
            computing.logits(message.batch)
        elif isinstance(message, Move):
            computing.move(message.moves)
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


def _exit(status: int) -> None:
    """End without the interpreter's own end, which would wait for the device and so for ranks that may be gone."""
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
