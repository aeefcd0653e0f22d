"""What rank 0 tells the other ranks of an engine: MessagePack over one Unix socket pair each, as in `messages`.

A rank sends nothing back but single bytes, heartbeats and answers to `Settle`: what it computes travels between the
devices.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import numpy as np

from longreach.engine.device.batch_builder import HostBatch
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.messages import LENGTH_BYTES, EngineConfig, frame_length, framed

BEAT = b"."
SETTLED = b"s"


class Join(msgspec.Struct, frozen=True, tag=True):
    """Be rank `rank` of the engine that `config` describes; the ranks find each other through the file `rendezvous`.

    With a `place_file` the rank's places in host memory are there, where rank 0 has them, too.
    """

    config: EngineConfig
    rank: int
    rendezvous: str
    place_file: str = ""


class Compute(msgspec.Struct, frozen=True, tag=True):
    """Compute a step. Where it has pending tokens, the ranks first take over those that rank 0 has drawn."""

    batch: HostBatch


class Move(msgspec.Struct, frozen=True, tag=True):
    """Copy and clean pages, as `step_retry.StepRunner.move`."""

    moves: CacheMoves


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Answer with `SETTLED` once all copies are made that were told before; the next message does not wait for that."""


ToRank = Join | Compute | Move | Settle


def encode(message: ToRank) -> bytes:
    """One message as it travels."""
    return framed(_encoder.encode(message))


def receive(connection: socket.socket) -> ToRank | None:
    """The next message, once it has come; None if there will be no more."""
    header = connection.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    if len(header) < LENGTH_BYTES:
        return None
    length = frame_length(header)
    body = bytearray(length)
    view = memoryview(body)
    while view:
        count = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if not count:
            return None
        view = view[count:]
    return _decoder.decode(body)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, slice):
        return value.start, value.stop
    raise NotImplementedError(f"{type(value).__name__} does not travel between ranks")


def _from_plain(kind: Any, value: Any) -> Any:
    if kind is slice:
        return slice(*value)
    dtype, shape, data = value
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(ToRank, dec_hook=_from_plain)
