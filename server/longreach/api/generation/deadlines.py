"""Deadlines to the first token: what cannot meet its own is refused, and what misses it ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator

from longreach.api.generation.predict import Prediction
from longreach.api.schema.requests.sampling import SamplingFields
from longreach.api.service.call import Call
from longreach.engine.updates import Update
from longreach.errors import DeadlineExceededError, DeadlineRefusedError


def deadline_of(call: Call[SamplingFields]) -> float | None:
    """When the first token of each answer is due, on the clock of `time.monotonic`; None where there is no deadline."""
    given = call.body.deadline_ms
    return None if given is None else call.record.started + given / 1000


def check_deadline(call: Call[SamplingFields], found: Prediction) -> None:
    """Note what is predicted for a call that has a deadline.

    Raises:
        DeadlineRefusedError: the prediction misses it.
    """
    given, due = call.body.deadline_ms, deadline_of(call)
    assert given is not None
    assert due is not None
    predicted = found.now
    call.record.due(given, predicted)
    if predicted is None or found.alone is None:
        return  # nothing is known: whether it can be met will be seen
    left = due - time.monotonic()
    if predicted <= left:
        return
    call.service.metrics.deadline("refused")
    passed = time.monotonic() - call.record.started
    waits = max(1, math.ceil(predicted - left)) if passed + found.alone <= given / 1000 else None
    raise DeadlineRefusedError(given, passed + predicted, passed + found.alone, waits)


async def in_time(
    call: Call[SamplingFields], updates: AsyncGenerator[Update, None], due: float
) -> AsyncGenerator[Update, None]:
    """The updates of a request, whose first token is `due`; see `deadline_of`. What was asked for is cancelled when it
    has not come by then.

    Raises:
        DeadlineExceededError: it has not come.
    """
    metrics, given = call.service.metrics, call.body.deadline_ms
    assert given is not None
    async with contextlib.aclosing(updates):
        while True:
            try:
                async with asyncio.timeout(due - time.monotonic()):
                    update = await anext(updates)
            except TimeoutError:
                metrics.deadline("exceeded")
                raise DeadlineExceededError(given) from None
            except StopAsyncIteration:
                return
            if update.tokens:
                break
            yield update
        metrics.deadline("met")
        yield update
        async for update in updates:
            yield update
