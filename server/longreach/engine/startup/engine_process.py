"""The engine process: `python -m longreach.engine.startup.engine_process FD`. Only `client.EngineClient` starts it.

Four threads share two queues. The reader turns frames into messages, the main thread computes, the writer sends: the
engine never waits for a slow owner. The fourth sends heartbeats, so that a long step does not look like a dead engine.
Grammars are compiled in threads of their own.
The process ends when its socket closes, and the kernel ends it if its parent dies.
"""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from longreach.engine.engine import Engine
from longreach.engine.errors import DeviceLostError
from longreach.engine.looks import Look
from longreach.engine.messages import (
    HEARTBEAT_SECONDS,
    LENGTH_BYTES,
    Cancel,
    EngineConfig,
    Failed,
    FromEngine,
    Generate,
    Heartbeat,
    Pin,
    Started,
    StartFailed,
    ToEngine,
    Unpin,
    encode_frame,
    frame_length,
    to_engine_decoder,
)
from longreach.engine.requests.request import Constraint
from longreach.engine.sampling.grammar_threads import Preparation, Prepared
from longreach.engine.startup.engine_memory import engine_memory
from longreach.engine.startup.phases import Phases, in_words, process_seconds
from longreach.util.child_process import EXIT_DEVICE_LOST, belong_to_parent, end
from longreach.util.log_lines import configure_logging
from longreach.util.memory import settle_garbage

Inbox = queue.SimpleQueue[ToEngine | Prepared | None]
StartGrammar = Callable[[str], Constraint]

logger = logging.getLogger(__name__)

_BEATS_A_LOOK = 20  # a process of hundreds of threads takes milliseconds to look through


def main() -> None:
    """Serve one owner over the inherited socket whose file descriptor is the only argument."""
    belong_to_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: Inbox = queue.SimpleQueue()
    outbox: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), name="reader", daemon=True).start()
    threading.Thread(target=_write, args=(connection, outbox), name="writer", daemon=True).start()
    config = inbox.get()
    if config is None:
        return
    assert isinstance(config, EngineConfig), f"expected a config first, got {type(config).__name__}"
    configure_logging("info", config.log_format, "engine")
    built = _start(config, connection, outbox)
    if built is None:
        return
    engine, start_grammar = built
    settle_garbage()
    threading.Thread(target=_beat, args=(engine, outbox), name="heartbeat", daemon=True).start()
    preparation = Preparation(start_grammar, inbox.put)
    try:
        _serve(engine, preparation, inbox, outbox)
        engine.close()
    except DeviceLostError as error:
        logger.critical("the device is lost: %s", error)
        end(EXIT_DEVICE_LOST)
    finally:
        preparation.close()
    end(0)


def _start(
    config: EngineConfig, connection: socket.socket, outbox: queue.SimpleQueue[FromEngine]
) -> tuple[Engine, StartGrammar | None] | None:
    from longreach.engine.startup.build import (
        build_engine,  # torch and transformers take seconds to import; the socket is up before
    )

    try:
        phases = Phases({"import libraries": process_seconds()})
        engine, started = build_engine(config)
        phases.seconds |= started.start_phases
        with phases.of("prepare grammars"):
            start_grammar = _grammars(config, started)
        started = msgspec.structs.replace(started, start_phases=phases.seconds)
        logger.info("started in %s", in_words(phases.seconds))
    except Exception as error:  # every cause of a failed start is reported to the owner
        logger.debug("start failed", exc_info=True)
        text = str(error).strip() or type(error).__name__
        connection.sendall(encode_frame(StartFailed(text.splitlines()[0])))
        return None
    outbox.put(started)
    return engine, start_grammar


def _grammars(config: EngineConfig, started: Started) -> StartGrammar | None:
    if config.tokenizer_file is None:
        return None
    from longreach.engine.sampling.grammar import (
        Grammars,  # engines without grammars run where llguidance is not installed
    )

    return Grammars(config.tokenizer_file, started.vocab_size, started.eos_token_ids).start


def _serve(engine: Engine, preparation: Preparation, inbox: Inbox, outbox: queue.SimpleQueue[FromEngine]) -> None:
    while True:
        # With nothing to compute, sleep until a message comes; otherwise take what is there and go on.
        while not engine.has_work or not inbox.empty():
            message = inbox.get()
            if message is None:
                return
            _take(message, engine, preparation, outbox)
        for news in engine.step():
            outbox.put(news)


def _take(
    message: ToEngine | Prepared, engine: Engine, preparation: Preparation, outbox: queue.SimpleQueue[FromEngine]
) -> None:
    """Do what a message asks for."""
    if isinstance(message, Prepared):
        if preparation.finish(message):
            _submit(engine, message.request, message.outcome, outbox)
    elif isinstance(message, Cancel):
        if not preparation.cancel(message.request_id):
            engine.cancel(message.request_id)
    elif isinstance(message, Look):
        outbox.put(engine.look(message))
    elif isinstance(message, Generate) and message.grammar is not None:
        preparation.begin(message)
    elif isinstance(message, Generate):
        _submit(engine, message, None, outbox)
    elif isinstance(message, Pin):
        engine.pin(message)
    elif isinstance(message, Unpin):
        engine.unpin(message.name)
    else:
        raise AssertionError(f"unexpected {type(message).__name__}")


def _submit(
    engine: Engine, request: Generate, outcome: Constraint | Failed | None, outbox: queue.SimpleQueue[FromEngine]
) -> None:
    failed = outcome if isinstance(outcome, Failed) else engine.submit(request, outcome)
    if failed is not None:
        outbox.put(failed)


def _read(connection: socket.socket, inbox: Inbox) -> None:
    try:
        with connection.makefile("rb") as stream:
            while len(header := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
                length = frame_length(header)
                body = stream.read(length)
                if len(body) < length:
                    break
                inbox.put(to_engine_decoder.decode(body))
    finally:  # an engine that hears nothing more would leave its requests hanging, whatever the reason
        inbox.put(None)


def _write(connection: socket.socket, outbox: queue.SimpleQueue[FromEngine]) -> None:
    while True:
        try:
            connection.sendall(encode_frame(outbox.get()))
        except (BrokenPipeError, ConnectionResetError):
            return  # the owner is gone; the reader has seen it too and ends the process


def _beat(engine: Engine, outbox: queue.SimpleQueue[FromEngine]) -> None:
    memory = engine_memory()
    for beat in itertools.count(1):
        if beat % _BEATS_A_LOOK == 0:
            memory = engine_memory()
        outbox.put(Heartbeat(engine.step_seconds, msgspec.structs.replace(engine.stats, memory=memory)))
        time.sleep(HEARTBEAT_SECONDS)


if __name__ == "__main__":
    main()
