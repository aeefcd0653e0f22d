"""What rank 0 says arrives as it was said."""

from __future__ import annotations

import dataclasses
import socket
import threading
from typing import Any

import numpy as np
import pytest
from longreach.engine.device.batch_builder import HostBatch, HostGroup
from longreach.engine.device.ranks.rank_messages import Compute, Join, Move, Settle, ToRank, encode, receive
from longreach.engine.kv_cache.offload_index import CacheMoves, Copy
from longreach.engine.messages import EngineConfig
from longreach.policies.values import DENSE, Dynamic, SparseDecode, VerticalSlash

POLICIES = DENSE, VerticalSlash(verticals=(1, 2)), Dynamic(density=0.5, decode_budget=64), SparseDecode(64)


def batch(tokens: int) -> HostBatch:
    rng = np.random.default_rng(tokens)
    long = [rng.integers(-1, 2**40, tokens) for _ in range(5)]
    short = [rng.integers(0, 2**30, tokens, np.int32) for _ in range(3)]
    groups = tuple(
        HostGroup(policy, slice(i, i + 1), slice(i, 2 * i + 3), short[i % 3], i, 2, 3, short[(i + 1) % 3])
        for i, policy in enumerate(POLICIES)
    )
    changes = rng.integers(0, 9, (2, tokens))
    return HostBatch(*long[:4], short[0], short[1], long[4], changes, 2, 9, tokens, 5, groups)


def flat(value: Any) -> Any:
    """Arrays as what makes them equal."""
    if dataclasses.is_dataclass(value):
        return [flat(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [flat(one) for one in value]
    return (value.dtype, value.shape, value.tolist()) if isinstance(value, np.ndarray) else (type(value), value)


def sent(messages: list[ToRank]) -> list[ToRank | None]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames = b"".join(encode(message) for message in messages)

        def send() -> None:
            ours.sendall(frames)
            ours.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)  # the buffers of the sockets hold less than a large step
        thread.start()
        found = [receive(theirs) for _ in range(len(messages) + 1)]
        thread.join()
    return found


@pytest.mark.parametrize("tokens", [1, 100_000])
def test_a_step_arrives_bit_by_bit_and_can_be_written_to(tokens: int) -> None:
    step = batch(tokens)
    got, end = sent([Compute(step)])
    assert end is None
    assert isinstance(got, Compute)
    assert flat(got.batch) == flat(step)
    got.batch.input_ids[0] = 7  # what waits for its token is filled in
    assert got.batch.has_pending == bool((got.batch.input_ids < 0).any())


def test_other_messages_arrive_in_order() -> None:
    moves = CacheMoves([Copy(1, (2,))], [3], [], [Copy(4, (5, 9, 6), is_state=True), Copy(6, (7,))])
    messages: list[ToRank] = [Join(EngineConfig(model="m", tensor_parallel_size=2), 1, "/x"), Move(moves), Settle()]
    assert sent(messages) == [*messages, None]
    assert isinstance(messages[1], Move)


def test_a_message_that_is_cut_short_is_none() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(encode(Compute(batch(100)))[:-1])
        assert receive(theirs) is None
