"""What a call would get if its prompts were sent now: one look for each of them, taken together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from longreach.api.schema.requests.sampling import SamplingFields
from longreach.api.service.call import Call
from longreach.engine.looks import Looked


@dataclass(frozen=True)
class Prediction:
    """Of each prompt that differs, what was found. Times are to the first token of the last of them, in seconds from
    now; None where nothing is known of what steps cost."""

    looks: list[Looked]

    @property
    def alone(self) -> float | None:
        """If the server did nothing else, with what is cached."""
        return _sum([found.seconds_alone for found in self.looks])

    @property
    def whole(self) -> float | None:
        """If nothing were cached, either."""
        return _sum([found.seconds_whole for found in self.looks])

    @property
    def dense(self) -> float | None:
        """If nothing were cached and attention were dense."""
        return _sum([found.seconds_dense for found in self.looks])

    @property
    def now(self) -> float | None:
        """In the present queue."""
        alone, last = self.alone, max(self.looks, key=lambda found: found.seconds_now or 0.0)
        if alone is None or last.seconds_now is None or last.seconds_alone is None:
            return None
        return last.seconds_now + alone - last.seconds_alone


def _sum(seconds: Sequence[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return sum(known) if len(known) == len(seconds) else None


async def predict(
    call: Call[SamplingFields],
    prompts: Sequence[list[int]],
    readers: Sequence[int],
    rope_factors: Sequence[float],
    *,
    max_tokens: int,
    choices: int,
) -> Prediction:
    """Look at the prompts of a call, each with so many answers of `max_tokens` tokens; those with one number in
    `readers` are equal, and that is the first one's. Each has its rotary table.

    Raises:
        EngineDeadError: the engine is gone.
        ClientGoneError: the caller went away.
    """
    body, attention = call.body, call.attention

    async def look(number: int, copies: int) -> Looked:
        return await call.engine.look(
            prompts[number],
            call.cache_salt,
            attention,
            rope_factors[number],
            max_tokens=max_tokens,
            answers=copies * choices,
            priority=body.priority,
            flexible=body.service_tier == "flex",
            caller=call.record.caller,
        )

    async def every() -> list[Looked]:
        return await asyncio.gather(*(look(number, copies) for number, copies in Counter(readers).items()))

    return Prediction(await call.attend(every()))
