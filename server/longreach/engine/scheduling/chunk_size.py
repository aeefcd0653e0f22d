"""How many tokens of a prompt one step computes. All rules about the length of a chunk are applied here.

    rule            | source                                 | the chunk
    ----------------+----------------------------------------+-----------------------------------------------------
    tokens          | `Limits.max_batched_tokens`            | fits into what is left of the step's tokens
    scored rows     | `prompt_lookup.MAX_DRAFTS`             | has no more scored tokens than rows of logits are left
    inter-token     | `Limits.max_itl`, `StepCost`           | takes no longer than the answers in the step may wait
    captured sizes  | `step_sizes.cut`                       | fills a captured step, where time has cut it
    least chunk     | `Limits.least_chunk`                   | is skipped below it, unless it is the step's first
    shared pages    | the scheduler's `stop`                 | ends where another request computes the next page
    policy          | `Request.policy_ends`                  | ends where the attention policy changes
    whole tiles     | `Request.needs_whole_tiles`, `Limits`      | is a multiple of a tile, unless it ends the prompt
    copies of state | `StateHold.cut`                        | ends at a border of pages that somebody may come back to

The rules are applied in this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longreach.engine.cost_model import StepCost, StepTime, Work
from longreach.engine.requests.prompt_lookup import MAX_DRAFTS
from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import Chunk
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.step_sizes import cut, places_for
from longreach.sizes import LEAST_TILED_STEP, TILE

# A step's prediction may be off by so much before the bound on inter-token delay is missed.
_HEADROOM = 0.95
# Where the streams alone reach the bound, prompts still get this part of it: slowly, but they are read.
_LEAST_SHARE = 0.25


@dataclass
class StepBudget:
    """What is left of a step for chunks of prompts.

    Attributes:
        tokens: tokens that the step may still compute.
        seconds: time that its prompts may still take; infinite where no answer waits for the step's end.
        scored_rows: rows of logits for prompts whose log-probabilities are wanted.
        places: rows that a captured step of so many answers has for them, unused ones included.
        rows: rows that the step has so far, `places` included.
        num_chunks: chunks of prompts that it has so far.
    """

    tokens: int
    seconds: float
    scored_rows: int
    places: int
    rows: int
    num_chunks: int = 0

    @classmethod
    def beside(cls, streams: Sequence[Chunk], limits: Limits, step_time: StepTime) -> StepBudget:
        """What the chunks of answers, `streams`, leave. Flexible answers do not bound the step's time."""
        places = places_for(len(streams))
        seconds = math.inf
        if not all(chunk.request.spec.flexible for chunk in streams):
            work = Work.of_step((chunk.start, chunk.length, chunk.visible) for chunk in streams)
            seconds = seconds_for_prompts(step_time.cost.seconds(work), limits.max_itl) / step_time.caution
        return cls(
            tokens=limits.max_batched_tokens - sum(chunk.length for chunk in streams),
            seconds=seconds,
            scored_rows=MAX_DRAFTS - sum(len(chunk.drafts) for chunk in streams),
            places=places,
            rows=places + sum(chunk.length - 1 for chunk in streams),
        )

    @property
    def is_spent(self) -> bool:
        """Whether no prompt gets any more of the step."""
        return self.tokens < 1 or self.seconds <= 0

    def take(self, request: Request, start: int, length: int, cost: StepCost) -> None:
        """Count a chunk of `length` tokens of a prompt, from position `start` on."""
        self.num_chunks += 1
        self.tokens -= length
        self.rows += length
        self.seconds -= cost.seconds(Work.of_chunk(start, length, request.visible))
        if request.wants_scores:
            self.scored_rows -= length


class ChunkLength(NamedTuple):
    """`tokens` of a chunk, 0 for none; `fills_step` where time has cut it, so that no other prompt gets a chunk."""

    tokens: int
    fills_step: bool = False


@dataclass(frozen=True)
class ChunkSizer:
    """Decides the lengths of prompts' chunks, at steps that cost `cost`, within `limits`."""

    limits: Limits
    cost: StepCost

    def length(self, request: Request, stop: int, left: StepBudget) -> ChunkLength:
        """The length of a request's next chunk, given what is `left` of the step.

        Another request computes the token at position `stop`, and those behind it, so far as they are of interest here.
        """
        start, end = request.computed, len(request.tokens)
        if self.limits.batch_invariant and start < request.prompt_tokens:
            end = request.prompt_tokens  # what is behind it, after a preemption, is computed as it was before
        limit = min(end - start, left.tokens, left.scored_rows if request.wants_scores else left.tokens)
        if limit < 1:
            return ChunkLength(0)
        length = limit
        if left.seconds != math.inf:
            length = self.cost.longest_chunk(start, limit, left.seconds, request.visible)
        # What is left of its time is then too little for another prompt, which would widen the step to no use.
        fills_step = length < limit
        if fills_step:
            length = cut(left.places, left.rows, length)
        multiple = self._multiple(request)
        least = min(max(self.limits.least_chunk, multiple), limit)
        if length < least:
            length = 0 if left.num_chunks else least
        length = min(length, stop - start)
        if start + length >= (border := request.policy_ends(start)):
            length = int(border) - start
        elif start + length < end:
            length -= (start + length) % multiple
        if length and request.states.unit:
            length = request.states.cut(start, length, end)
        return ChunkLength(length, fills_step)

    def _multiple(self, request: Request) -> int:
        """Tokens of which a chunk's end is a multiple, unless it ends the prompt.

        What a dynamic policy chooses for a tile of queries depends on where the tile begins. Where bits must not depend
        on how a prompt is cut, patterns of blocks need whole tiles, too: the order of a tile's keys depends on where
        it begins. A step has to hold some tiles beside the answers.
        """
        if request.needs_whole_tiles:
            return TILE
        whole_tiles = self.limits.batch_invariant and self.limits.max_batched_tokens >= LEAST_TILED_STEP
        return (
            TILE if whole_tiles and not request.spec.attention.is_dense and request.spec.prompt_logprobs is None else 1
        )


def seconds_for_prompts(beside: float, max_itl: float) -> float:
    """How long the prompts' chunks may take in a step that takes `beside` without them, so that its answers get a token
    every `max_itl`."""
    return max(_HEADROOM * max_itl - beside, _LEAST_SHARE * max_itl)
