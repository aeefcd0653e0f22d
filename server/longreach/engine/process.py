"""The engine process: `python -m longreach.engine.process FD`, started by `EngineClient` and by nothing else.

Four threads share two queues. The reader turns frames into messages, the main thread computes, the writer sends: the
engine never waits for a slow owner. The fourth sends heartbeats, so that a long step does not look like a dead engine.
The process ends when its socket closes, and the kernel ends it if its parent dies.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time

from .engine import Engine
from .errors import DeviceLostError
from .messages import (
    HEARTBEAT_SECONDS,
    LENGTH_BYTES,
    Cancel,
    EngineConfig,
    FromEngine,
    Generate,
    Heartbeat,
    StartFailed,
    ToEngine,
    encode_frame,
    frame_length,
    to_engine_decoder,
)

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

EXIT_DEVICE_LOST = 3


def main() -> None:
    """Serve one owner over the inherited socket whose file descriptor is the only argument."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s engine: %(message)s", stream=sys.stderr)
    # The owner decides when this process ends: a Ctrl-C or stop signal to the whole group must not cut its drain short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
    outbox: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), name="reader", daemon=True).start()
    threading.Thread(target=_write, args=(connection, outbox), name="writer", daemon=True).start()
    config = inbox.get()
    if config is None:
        return
    assert isinstance(config, EngineConfig), f"expected a config first, got {type(config).__name__}"
    engine = _start(config, connection, outbox)
    if engine is None:
        return
    threading.Thread(target=_beat, args=(engine, outbox), name="heartbeat", daemon=True).start()
    try:
        _serve(engine, inbox, outbox)
    except DeviceLostError as error:
        logger.critical("the device is lost: %s", error)
        logging.shutdown()
        os._exit(EXIT_DEVICE_LOST)  # an orderly end would wait for the device


def _start(config: EngineConfig, connection: socket.socket, outbox: queue.SimpleQueue[FromEngine]) -> Engine | None:
    from .build import build_engine  # torch and transformers take seconds to import; the socket is up before

    try:
        engine, started = build_engine(config)
    except Exception as error:  # every cause of a failed start is reported to the owner
        logger.debug("start failed", exc_info=True)
        text = str(error).strip() or type(error).__name__
        connection.sendall(encode_frame(StartFailed(text.splitlines()[0])))
        return None
    outbox.put(started)
    return engine


def _serve(engine: Engine, inbox: queue.SimpleQueue[ToEngine | None], outbox: queue.SimpleQueue[FromEngine]) -> None:
    while True:
        # With nothing to compute, sleep until a message comes; otherwise take what is there and go on.
        while not engine.has_work or not inbox.empty():
            message = inbox.get()
            if message is None:
                return
            if isinstance(message, Generate):
                if failed := engine.submit(message):
                    outbox.put(failed)
            elif isinstance(message, Cancel):
                engine.cancel(message.request_id)
            else:
                raise AssertionError(f"unexpected {type(message).__name__}")
        for news in engine.step():
            outbox.put(news)


def _read(connection: socket.socket, inbox: queue.SimpleQueue[ToEngine | None]) -> None:
    with connection.makefile("rb") as stream:
        while len(header := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
            length = frame_length(header)
            body = stream.read(length)
            if len(body) < length:
                break
            inbox.put(to_engine_decoder.decode(body))
    inbox.put(None)


def _write(connection: socket.socket, outbox: queue.SimpleQueue[FromEngine]) -> None:
    while True:
        try:
            connection.sendall(encode_frame(outbox.get()))
        except (BrokenPipeError, ConnectionResetError):
            return  # the owner is gone; the reader has seen it too and ends the process


def _beat(engine: Engine, outbox: queue.SimpleQueue[FromEngine]) -> None:
    while True:
        outbox.put(Heartbeat(engine.step_seconds, engine.stats))
        time.sleep(HEARTBEAT_SECONDS)


def _die_with_parent() -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


if __name__ == "__main__":
    main()
