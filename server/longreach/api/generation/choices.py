"""Several answers at once: to the prompts of a batch, `n` to each, of which the likeliest may be chosen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from longreach.api.generation.text_stream import PlannedAnswer, TextDelta, generate_text
from longreach.api.service.call import Call
from longreach.engine.updates import FinishReason, Logprob

T = TypeVar("T")


@dataclass
class FinishedAnswer:
    """One finished answer."""

    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[tuple[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, delta: TextDelta) -> None:
        """Append what has come."""
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.tokens += delta.tokens

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens; needs `logprobs`."""
        return sum(score.logprob for _, score in self.logprobs) / max(len(self.logprobs), 1)


@dataclass(frozen=True)
class RunningAnswers:
    """All answers to a call: their plans, and their `deltas` with their numbers, as they come.

    The copies of a prompt share the reading of it through the prefix cache. Closing `deltas` cancels all answers. So
    does the failure of one, which is raised.
    """

    planned: Sequence[PlannedAnswer]
    deltas: AsyncGenerator[tuple[int, TextDelta], None]


def run_answers(call: Call[Any], planned: Sequence[PlannedAnswer]) -> RunningAnswers:
    """Run all answers at once, from when the first delta is wanted."""
    return RunningAnswers(planned, merge([generate_text(call, answer) for answer in planned]))


async def collect(running: RunningAnswers) -> list[FinishedAnswer]:
    """All answers, whole."""
    answers = [FinishedAnswer() for _ in running.planned]
    async with contextlib.aclosing(running.deltas) as deltas:
        async for index, delta in deltas:
            answers[index].add(delta)
    return answers


def likeliest(answers: Sequence[FinishedAnswer], candidates: int, n: int) -> list[FinishedAnswer]:
    """The `n` likeliest of each prompt's `candidates`, likeliest first; the prompt's own log-probabilities go along."""
    chosen: list[FinishedAnswer] = []
    for start in range(0, len(answers), candidates):
        group = answers[start : start + candidates]
        chosen += sorted(group, key=lambda answer: answer.likelihood, reverse=True)[:n] if n < candidates else group
    return chosen


@dataclass(frozen=True)
class _End(Generic[T]):
    error: Exception | None


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all `streams`, each with its stream's number, as they come.

    At most one item of each waits to be taken: a slow reader slows the streams down.
    """
    queue: asyncio.Queue[tuple[int, T] | _End] = asyncio.Queue(len(streams))

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        error = None
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put((number, item))
        except Exception as caught:  # noqa: BLE001 - raised by the reader
            error = caught
        await queue.put(_End(error))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
                continue
            running -= 1
            if item.error is not None:
                raise item.error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
