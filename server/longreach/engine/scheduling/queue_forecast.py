"""When the prompts of a queue will have been read: the scheduler's rules, applied to what is expected. Plain numbers.

Prompts are read one after another, in the order of their ranks. Each then has its answer written beside the next ones.
Answers have their lengths from `answer_lengths`; whoever comes later is not foreseen. Chunks of one prompt are taken to
be of equal length, and a step is shared by the end of one prompt and the beginning of the next.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

from longreach.engine.cost_model import StepCost, Work
from longreach.engine.scheduling.chunk_size import seconds_for_prompts
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.step_sizes import cut, places_for
from longreach.policies.visible import Visible


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is left to read of a prompt, tokens `start` to `end`, and what comes of it.

    Attributes:
        visible: how much of its prompt a query sees; None for all.
        flexible: no step is shortened for its answer.
        answer: tokens that its answer is expected to have.
        waits: it has not been let in; then `missing` is how many pages must be available for that.
        held: pages that can be had when its answer has ended.
    """

    start: int
    end: int
    visible: Visible | None = None
    flexible: bool = False
    answer: float = 1.0
    waits: bool = False
    missing: int = 0
    held: int = 0


class _Answer(NamedTuple):
    """An answer that is being written: the step after which it ends, and what its token adds to a step."""

    end: float
    seconds: float
    bounds: bool  # steps are kept short for it
    held: int


class _Pace(NamedTuple):
    """How a prompt is read: tokens of a step, the time of each, and what a step takes besides, which does not depend on
    how many they are."""

    chunk: float
    each: float
    of_step: float


class QueueForecast:
    """A clock that starts at 0, and goes on by what is read.

    `pages` and `slots` are those that can be had now; `caution` is that of `StepTime`, whose cost is `cost`.
    """

    def __init__(self, cost: StepCost, caution: float, limits: Limits, pages: int, slots: int) -> None:
        self.seconds = 0.0
        self._cost = cost
        self._caution = caution
        self._limits = limits
        self._pages = pages
        self._slots = slots
        self._steps = 0.0
        self._beside = cost.per_step  # what a step takes without prompts
        self._bounding = 0
        self._answers: list[_Answer] = []  # a heap, by their ends
        self._beginning: list[_Answer] = []  # with the next step

    def wait_until(self, seconds: float) -> None:
        """Let a time come, if it has not; nothing is read meanwhile."""
        self.seconds = max(self.seconds, seconds)

    def write(self, context: int, prompt: Prompt, tokens: float | None = None) -> None:
        """The answer to a prompt is written from now on, or its last `tokens`; `context` are those before it."""
        tokens = prompt.answer if tokens is None else tokens
        if tokens <= 0:
            self._pages += prompt.held
            self._slots += 1
            return
        seconds = self._cost.seconds(Work.of_chunk(context, 1, prompt.visible))
        begin = math.ceil(self._steps)
        self._beginning.append(_Answer(begin + tokens, seconds, not prompt.flexible, prompt.held))
        if begin == self._steps:
            self._begin()

    def read(self, prompt: Prompt) -> None:
        """Read a prompt up to its first token, once there is room for it."""
        if prompt.waits:
            while self._ending and not (self._slots > 0 and prompt.missing <= self._pages):
                self._pass(self._until_change, 0.0)
            self._slots -= 1
            self._pages -= prompt.missing
        start, end = prompt.start, prompt.end
        while True:
            pace = self._pace(start, end, prompt.visible)
            left = self._until_change
            if left * pace.chunk >= end - start:
                break
            self._pass(left, left * (pace.of_step + pace.chunk * pace.each))
            start = min(start + int(left * pace.chunk), end - 1)
        steps = (end - start) / pace.chunk
        self._pass(steps, steps * pace.of_step + (end - start) * pace.each)
        self.write(end, prompt, prompt.answer - 1)

    def end_step(self, following: Prompt | None) -> None:
        """Let the step end in which the last prompt is read to its end; the `following` one gets what is left of it."""
        part = math.ceil(self._steps) - self._steps
        if not part:
            return
        if following is None:
            self.seconds += part * self._beside
            return
        start, visible = following.start, following.visible
        most = self._pace(start, start + 1, visible).chunk
        tokens = min(math.ceil(part * most), following.end - start)
        pace = self._pace(start, start + tokens, visible)
        self.seconds += part * (self._beside + pace.of_step) + min(tokens, part * pace.chunk) * pace.each

    @property
    def _ending(self) -> bool:
        """Whether any answer will end."""
        return bool(self._answers or self._beginning)

    @property
    def _until_change(self) -> float:
        """Steps until an answer begins or ends."""
        if self._beginning:
            return math.floor(self._steps) + 1 - self._steps
        return self._answers[0].end - self._steps if self._answers else math.inf

    def _pace(self, start: int, end: int, visible: Visible | None) -> _Pace:
        tokens, whole = end - start, Work.of_chunk(start, end - start, visible)
        keys = start + end if visible is None else visible.keys(start) + visible.keys(end)
        of_step = self._cost.seconds(Work(0, 0, 0, keys // 2))
        each = self._cost.seconds(Work(0, tokens, whole.pairs)) / tokens
        return _Pace(self._chunk(tokens, each, of_step), each, of_step)

    def _chunk(self, tokens: int, each: float, of_step: float) -> float:
        """How many tokens of a prompt a step reads that take `each` so long, and `of_step` besides."""
        answers = len(self._answers)
        most = max(1, self._limits.max_batched_tokens - answers)
        if not self._bounding or self._limits.max_itl == math.inf:
            return most
        seconds = seconds_for_prompts(self._beside, self._limits.max_itl) / self._caution
        chunk = int(max(seconds - of_step, 0.0) / each) if each else most
        if chunk >= most:
            return most
        places = places_for(answers)
        return max(cut(places, places, chunk) if chunk < tokens else chunk, self._limits.least_chunk)

    def _pass(self, steps: float, seconds: float) -> None:
        """So many steps are computed, which take `seconds` beside the answers."""
        self.seconds += steps * self._beside + seconds
        before, self._steps = math.floor(self._steps), self._steps + steps
        if math.floor(self._steps) > before:
            self._begin()
        while self._answers and self._answers[0].end <= self._steps:
            ended = heapq.heappop(self._answers)
            self._beside -= ended.seconds
            self._bounding -= ended.bounds
            self._pages += ended.held
            self._slots += 1

    def _begin(self) -> None:
        for answer in self._beginning:
            heapq.heappush(self._answers, answer)
            self._beside += answer.seconds
            self._bounding += answer.bounds
        self._beginning.clear()
